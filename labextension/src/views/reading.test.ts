import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { MeshStore } from '../model';
import { hangSection, stacksSection } from '../panel/asksections';
import { AnsweredActions, aRank, aSnapshot, completeDom, find } from '../testing';
import { RankDetails } from './details';

let store: MeshStore;
let actions: AnsweredActions;
let version = 1;

beforeEach(() => {
  completeDom();
  vi.useFakeTimers();
  vi.setSystemTime(100_000);
  store = new MeshStore();
  actions = new AnsweredActions();
  version = 1;
  store.apply(aSnapshot([aRank(0, { state: 'running', doing: 'cell [1]', proc: 'p0' }), aRank(1)]));
  document.body.replaceChildren();
});

afterEach(() => {
  vi.useRealTimers();
});

const pass = (ms: number) => vi.advanceTimersByTimeAsync(ms);

function change(fields: object, mesh: object = {}): void {
  const meshes = [{ ...aSnapshot([]).meshes[0], ...mesh }];
  store.apply({ kind: 'changes', base: version, version: ++version, time: 1, ranks: { u1: { '0': fields } }, meshes });
}

describe('what is read of ranks', () => {
  it('says how old it is, and is read again when the ranks do something else', async () => {
    const section = stacksSection(document.body, store, actions, 'u1');
    const frames = [{ function: 'all_reduce', file: 'cell [1]', line: 2 }];
    actions.last().answer({ stacks: [{ ranks: [0], frames }] });
    await pass(0);
    expect(document.body.textContent).toContain('all_reduce');
    await pass(14_500);
    expect(find(document.body, '.mk-Reading-age').textContent).toBe('read 14 s ago');
    expect(actions.asked).toHaveLength(1);
    change({ state: 'idle', doing: '' });
    section.update?.();
    expect(actions.asked).toHaveLength(2);
    actions.last().answer({ stacks: [{ ranks: [0, 1], frames: [], note: 'idle' }] });
    await pass(0);
    expect(document.body.textContent).not.toContain('all_reduce');
    expect(find(document.body, '.mk-Reading-age').textContent).toBe('read 0 s ago');
    change({ state: 'running', doing: 'cell [2]' });
    section.update?.();
    expect(actions.asked).toHaveLength(2); // at most each two seconds
    await pass(3_000);
    expect(actions.asked).toHaveLength(3);
    section.dispose();
    change({ state: 'idle', doing: '' });
    await pass(10_000);
    expect(actions.asked).toHaveLength(3);
  });

  it('has one verdict on a hang: what was so before goes', async () => {
    const section = hangSection(document.body, store, actions, 'u1');
    actions.last().answer({ hangs: false, text: 'No rank waits for another.' });
    await pass(0);
    section.update?.();
    change({}, { hang: 'Rank 1 has not entered all_reduce' });
    section.update?.();
    expect(document.body.textContent).not.toContain('No rank waits');
    expect(find(document.body, '.mk-Hang-known').textContent).toBe('Rank 1 has not entered all_reduce');
    actions.last().answer({ hangs: true, text: 'Rank 1 has not entered all_reduce: it sleeps' });
    await pass(0);
    section.update?.();
    expect(find(document.body, '.mk-Hang-known').hidden).toBe(true);
    expect(find(document.body, 'pre').textContent).toContain('it sleeps');
    section.dispose();
  });

  it('is of the process that is there now: a healed rank is asked anew', async () => {
    const details = new RankDetails(document.body, store, actions, () => undefined);
    details.show('u1', 0);
    [...document.querySelectorAll('button')].find(each => each.textContent === 'Variables')?.click();
    actions.last().answer({ frame: null, variables: [{ name: 'old', type: 'int', text: '1' }] });
    await pass(3_000);
    expect(document.body.textContent).toContain('old');
    change({ proc: 'p0-healed', pid: 7, state: 'idle', doing: '' });
    details.update();
    expect(actions.asked).toHaveLength(2);
    actions.last().answer({ frame: null, variables: [] });
    await pass(0);
    expect(document.body.textContent).not.toContain('old');
    details.dispose();
  });
});
