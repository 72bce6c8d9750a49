import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { aRank, aSnapshot } from '../testing';
import { FeedClient, LEASE_EVERY, RequestError, SILENCE } from './feed';
import type { FrontEndMessage } from './messages';

beforeEach(() => {
  vi.useFakeTimers();
});

afterEach(() => {
  vi.useRealTimers();
});

function opened() {
  const sent: FrontEndMessage[] = [];
  const client = new FeedClient(message => sent.push(message));
  const kinds = () => sent.map(message => message.kind);
  return { sent, client, kinds };
}

/** The last message, which has an id. */
function lastOf(sent: FrontEndMessage[]): FrontEndMessage & { id: string } {
  const last = sent.at(-1);
  if (!last || !('id' in last)) {
    throw new Error('no request was sent');
  }
  return last;
}

const alive = { kind: 'alive', time: 1, version: -1 } as const;

describe('FeedClient', () => {
  it('renews the lease while it is visible, and only then', () => {
    const { client, kinds } = opened();
    expect(kinds()).toEqual([]);
    client.setVisible(true);
    client.setVisible(true);
    vi.advanceTimersByTime(LEASE_EVERY * 2);
    expect(kinds()).toEqual(['lease', 'lease', 'lease']);
    client.setVisible(false);
    vi.advanceTimersByTime(LEASE_EVERY * 4);
    expect(kinds()).toHaveLength(3);
    client.dispose();
    expect(vi.getTimerCount()).toBe(0);
  });

  it('asks once for a snapshot after a gap, and again when that does not come', () => {
    const { client, kinds } = opened();
    const gap = { kind: 'changes', base: 4, version: 5, time: 1 } as const;
    client.receive(gap);
    client.receive(gap);
    expect(kinds()).toEqual(['again']);
    vi.advanceTimersByTime(2_000);
    client.receive(gap);
    expect(kinds()).toEqual(['again', 'again']);
    client.receive(aSnapshot([aRank(0)], 5));
    client.receive({ kind: 'changes', base: 5, version: 6, time: 1 });
    expect(kinds()).toHaveLength(2);
    expect(client.store.version).toBe(6);
  });

  it('finds with the next lease that changes were lost', () => {
    const { client, kinds } = opened();
    client.receive(aSnapshot([aRank(0)], 5));
    client.receive({ ...alive, version: 5 });
    expect(kinds()).toEqual([]);
    client.receive({ ...alive, version: 6 });
    expect(kinds()).toEqual(['again']);
  });

  it('takes a silent kernel for gone, and a message for its return', () => {
    const { client } = opened();
    const told: string[] = [];
    client.onConnection(connection => told.push(connection));
    client.setVisible(true);
    client.receive(alive);
    vi.advanceTimersByTime(SILENCE - LEASE_EVERY);
    expect(told).toEqual(['live']);
    vi.advanceTimersByTime(2 * LEASE_EVERY);
    expect(told).toEqual(['live', 'gone']);
    client.receive(alive);
    expect(told).toEqual(['live', 'gone', 'live']);
    client.dispose();
  });

  it('does not take a kernel for gone that it did not look at', () => {
    const { client } = opened();
    client.setVisible(true);
    client.receive(alive);
    client.setVisible(false);
    vi.advanceTimersByTime(SILENCE * 5);
    client.setVisible(true);
    vi.advanceTimersByTime(LEASE_EVERY);
    expect(client.connection).toBe('live');
    client.dispose();
  });

  it('carries what is asked, and its answer', async () => {
    const { client, sent } = opened();
    const answer = client.ask('log', 'u1', [3], { lines: 10 });
    const request = lastOf(sent);
    expect(request).toMatchObject({ kind: 'ask', what: 'log', mesh: 'u1', ranks: [3], lines: 10 });
    client.receive({ kind: 'answer', id: 'of another view', value: 1 });
    client.receive({ kind: 'answer', id: request.id, value: { lines: [], dropped: 0 } });
    await expect(answer).resolves.toEqual({ lines: [], dropped: 0 });
    expect(vi.getTimerCount()).toBe(0);
  });

  it('says why something was not done', async () => {
    const { client, sent } = opened();
    const done = client.perform('kill', 'u1', [3]);
    const error = { message: 'rank 3 is dead', hint: 'heal it' };
    client.receive({ kind: 'answer', id: lastOf(sent).id, error });
    await expect(done).rejects.toThrow(RequestError);
    await expect(done).rejects.toMatchObject(error);
  });

  it('ends what waits when the kernel goes, when it is too late, and when it cannot be sent', async () => {
    const { client } = opened();
    const waiting = client.ask('stack', 'u1', [0]);
    client.close();
    await expect(waiting).rejects.toThrow('The kernel has gone.');
    await expect(client.ask('stack', 'u1', [0])).rejects.toThrow('The kernel has gone.');

    const slow = opened().client.ask('stack', 'u1', [0]);
    vi.advanceTimersByTime(120_000);
    await expect(slow).rejects.toThrow('120 s');

    const cut = new FeedClient(() => {
      throw new Error('the comm is closed');
    });
    await expect(cut.ask('stack', 'u1', [0])).rejects.toThrow('The kernel has gone.');
    expect(cut.connection).toBe('gone');
  });

  it('follows logs until it is told not to, and begins again when the kernel is back', () => {
    const { client, sent, kinds } = opened();
    const lines: unknown[] = [];
    const end = client.follow('u1', [], '', message => lines.push(...message.lines));
    const { id } = lastOf(sent);
    client.receive({ kind: 'log', id, lines: [[0, 'stdout', 'hello']], dropped: 0 });
    client.receive({ kind: 'log', id: 'other', lines: [[0, 'stdout', 'no']], dropped: 0 });
    expect(lines).toEqual([[0, 'stdout', 'hello']]);
    client.close();
    client.receive(alive);
    expect(kinds()).toEqual(['follow', 'follow']);
    expect(lastOf(sent).id).toBe(id);
    end();
    end();
    expect(kinds()).toEqual(['follow', 'follow', 'unfollow']);
    client.dispose();
    expect(kinds()).toHaveLength(3);
  });

  it('says why a log cannot be followed', () => {
    const { client, sent } = opened();
    const failed: string[] = [];
    client.follow(
      'u1',
      [],
      '',
      () => undefined,
      error => failed.push(error.message)
    );
    client.receive({ kind: 'answer', id: lastOf(sent).id, error: { message: 'too many logs are followed' } });
    expect(failed).toEqual(['too many logs are followed']);
    client.dispose();
  });

  it('begins again after it was hidden for longer than the lease', () => {
    const { client, kinds } = opened();
    client.setVisible(true);
    client.plot({ mesh: 'u1', expression: 'loss', period: 1 }, () => undefined);
    client.setVisible(false);
    vi.advanceTimersByTime(1_000);
    client.setVisible(true);
    expect(kinds()).toEqual(['lease', 'plot', 'lease']);
    client.setVisible(false);
    vi.advanceTimersByTime(SILENCE);
    client.setVisible(true);
    expect(kinds()).toEqual(['lease', 'plot', 'lease', 'lease', 'plot']);
    client.dispose();
    expect(kinds().at(-1)).toBe('unplot');
  });

  it('has ids that no other client has', () => {
    const some = opened();
    const other = opened();
    void some.client.ask('stack', 'u1', [0]);
    void other.client.ask('stack', 'u1', [0]);
    expect(lastOf(some.sent).id).not.toBe(lastOf(other.sent).id);
  });
});
