import { describe, expect, it } from 'vitest';
import { aRank, aSnapshot } from '../testing';
import { MeshStore, type StoreChange } from './store';

function opened() {
  const store = new MeshStore();
  const changes: StoreChange[] = [];
  store.apply(aSnapshot([aRank(0), aRank(1, { state: 'running', doing: 'cell [1]', doing_since: 90 })]));
  store.subscribe(change => changes.push(change));
  return { store, changes };
}

describe('MeshStore', () => {
  it('puts fields back that the kernel left out as they have their default', () => {
    const store = new MeshStore();
    store.apply({
      kind: 'snapshot',
      version: 3,
      time: 1,
      meshes: [{ key: 'u1', name: 'm' }],
      hosts: [{ key: 'h', name: 'b', gpus: [{ index: 1, name: 'H100' } as never] }],
      ranks: { u1: [{ mesh: 'u1', rank: 0, actors: [{ name: 'a' } as never] }] },
      failures: []
    });
    expect(store.rank('u1', 0)).toMatchObject({
      state: 'starting',
      rss: 0,
      stop: null,
      actors: [{ name: 'a', waiting: 0 }]
    });
    expect(store.hosts.get('h')).toMatchObject({ cores: 0, gpus: [{ name: 'H100', memory_used: 0 }] });
    expect(store.meshes.get('u1')).toMatchObject({ sizes: [], hang: '' });
  });

  it('changes only the fields that are told, also back to their default', () => {
    const { store, changes } = opened();
    const untouched = store.rank('u1', 0);
    const done = store.apply({
      kind: 'changes',
      base: 1,
      version: 2,
      time: 2,
      ranks: { u1: { '1': { state: 'idle', doing: '', doing_since: 0 } } }
    });
    expect(done).toBe(true);
    expect(store.rank('u1', 1)).toMatchObject({ state: 'idle', doing: '', host: 'h1' });
    expect(store.rank('u1', 0)).toBe(untouched);
    expect(changes).toEqual([{ structure: false, ranks: new Map([['u1', new Set([1])]]), failures: false }]);
  });

  it('refuses changes that do not continue what it has, and applies nothing of them', () => {
    const { store, changes } = opened();
    const gap = { kind: 'changes', base: 5, version: 6, time: 2, ranks: { u1: { '1': { state: 'dead' } } } } as const;
    expect(store.apply(gap)).toBe(false);
    expect(store.version).toBe(1);
    expect(store.rank('u1', 1)?.state).toBe('running');
    expect(changes).toEqual([]);
    expect(new MeshStore().apply({ kind: 'changes', base: 0, version: 1, time: 1 })).toBe(false);
  });

  it('leaves changes alone that a snapshot has overtaken', () => {
    const { store, changes } = opened();
    store.apply(aSnapshot([aRank(0), aRank(1)], 7));
    changes.length = 0;
    const late = { kind: 'changes', base: 5, version: 6, time: 2, ranks: { u1: { '1': { state: 'dead' } } } } as const;
    expect(store.apply(late)).toBe(true);
    expect(store.rank('u1', 1)?.state).toBe('idle');
    expect(changes).toEqual([]);
  });

  it('knows meshes and hosts that come and go', () => {
    const { store, changes } = opened();
    store.apply({
      kind: 'changes',
      base: 1,
      version: 2,
      time: 2,
      meshes: [{ key: 'u2', name: 'n' }],
      hosts: [{ key: 'h2', name: 'c' }],
      ranks: { u2: { '0': { state: 'starting', host: 'h2' }, '1': {} } },
      gone: { meshes: ['u1'], hosts: ['h1'] }
    });
    expect([...store.meshes.keys()]).toEqual(['u2']);
    expect([...store.hosts.keys()]).toEqual(['h2']);
    expect(store.ranks('u1')).toEqual([]);
    expect(store.ranks('u2').map(rank => [rank.mesh, rank.rank, rank.state])).toEqual([
      ['u2', 0, 'starting'],
      ['u2', 1, 'starting']
    ]);
    expect(changes[0]?.structure).toBe(true);
  });

  it('takes figures of a host for no change of what is where', () => {
    const { store, changes } = opened();
    const host = { key: 'h1', name: 'name-of-h1', cpu: 50 };
    store.apply({ kind: 'changes', base: 1, version: 2, time: 2, hosts: [host] });
    expect(changes.at(-1)?.structure).toBe(false);
    store.apply({ kind: 'changes', base: 2, version: 3, time: 2, hosts: [{ ...host, gone: 'timed out' }] });
    expect(changes.at(-1)?.structure).toBe(true);
  });

  it('has the clock of the controller', () => {
    const { store } = opened();
    store.setClock(1_000);
    expect(store.now()).toBeGreaterThanOrEqual(1_000);
    expect(store.now()).toBeLessThan(1_060);
  });

  it('keeps the last failures', () => {
    const { store } = opened();
    const failure = (number: number) => ({
      number,
      time: 1,
      mesh: 'u1',
      ranks: [0],
      kind: 'error' as const,
      text: 'x'
    });
    const failures = Array.from({ length: 500 }, (_, number) => failure(number));
    store.apply({ kind: 'changes', base: 1, version: 2, time: 2, failures });
    expect(store.failures).toHaveLength(200);
    expect(store.failures.at(-1)?.number).toBe(499);
  });
});
