import { afterEach, describe, expect, it } from 'vitest';
import { aRank } from '../testing';
import { duration, figure, memory, textSize, wholeDuration } from './quantities';
import { formatRanks, parseRanks } from './rankset';
import { byHost, describeRank, endingOf, groupFailures, headlineOf, troublesOf } from './summary';
import { t, tn, useTranslation } from './translation';
import { completeHost, completeMesh } from './views';

const SIGKILL = 'killed by signal 9 (SIGKILL)';

describe('quantities', () => {
  // The same as tests/display/test_quantities.py has for monarch_kernel/display/quantities.py.
  it.each([
    [0, '0.0 s'],
    [0.0001, '1 ms'],
    [0.008, '8 ms'],
    [0.2, '0.2 s'],
    [9.94, '9.9 s'],
    [14.7, '14 s'],
    [185, '3 min 5 s'],
    [7_800, '2 h 10 min']
  ])('%f seconds are %s', (seconds, text) => expect(duration(seconds)).toBe(text));

  it('has whole seconds for what was some time ago', () => {
    expect([-1, 0.4, 9.9, 185].map(wholeDuration)).toEqual(['0 s', '0 s', '9 s', '3 min 5 s']);
  });

  it('has sizes', () => {
    expect([memory(12e6), memory(1.44e9)]).toEqual(['12 MB', '1.4 GB']);
    expect([textSize(1), textSize(120), textSize(14_200), textSize(1.4e6), textSize(2.5e9)]).toEqual([
      '1 byte',
      '120 bytes',
      '14 kB',
      '1.4 MB',
      '2.5 GB'
    ]);
  });

  it('has short numbers', () => {
    expect([0, 0.02134, 12.4, 1234.56, 1.2e9, 3e-7].map(figure)).toEqual([
      '0',
      '0.02134',
      '12.4',
      '1235',
      '1.2e+9',
      '3e-7'
    ]);
  });
});

describe('sets of ranks', () => {
  it('joins runs', () => {
    expect(formatRanks([7, 3, 1, 0, 2, 9, 10, 3])).toBe('0-3, 7, 9, 10');
    expect(formatRanks([])).toBe('');
  });

  it('reads what people write', () => {
    expect(parseRanks('0-3, 7 9:10')).toEqual([0, 1, 2, 3, 7, 9, 10]);
    expect(parseRanks('')).toEqual([]);
    expect(parseRanks('3-1')).toBeNull();
    expect(parseRanks('all')).toBeNull();
  });
});

describe('headline', () => {
  const mesh = completeMesh({ key: 'u1', name: 'm' });
  const idle = (count: number) => Array.from({ length: count }, (_, rank) => aRank(rank));

  it('has the worst news, with its cause where it is one', () => {
    const ranks = [...idle(7), aRank(7, { state: 'dead', cause: SIGKILL })];
    expect(headlineOf(mesh, ranks).text).toBe(`8 ranks · 1 dead: ${SIGKILL}`);
    expect(headlineOf(mesh, ranks).state).toBe('dead');
    const more = [...ranks, aRank(8, { state: 'stopped' })];
    expect(headlineOf(mesh, more).text).toBe('9 ranks · 1 dead · 1 stopped');
  });

  it('says of a mesh that nothing is wrong with what it does', () => {
    expect(headlineOf(mesh, idle(1)).text).toBe('1 rank · idle');
    expect(headlineOf(mesh, [aRank(0, { state: 'running' })]).text).toBe('1 rank · all running');
    expect(headlineOf(mesh, [...idle(3), aRank(3, { state: 'running' })]).text).toBe('4 ranks · 1 running');
    expect(headlineOf(mesh, [...idle(3), aRank(3, { older: true })]).text).toBe(
      '4 ranks · 1 with modules of an older tree'
    );
    expect(headlineOf({ ...mesh, hang: 'rank 3 waits' }, idle(2))).toMatchObject({
      state: 'hang',
      news: 'rank 3 waits'
    });
  });

  it('warns of the end of a walltime, unless something is worse, and no longer when it is over', () => {
    const hosts = new Map(
      [
        { key: 'a', name: 'node1', ends_at: 160, then: 'save' },
        { key: 'b', name: 'node2', ends_at: 130, then: 'save' },
        { key: 'c', name: 'node3' }
      ].map(host => [host.key, completeHost(host)])
    );
    const on = completeMesh({ key: 'u1', name: 'm', hosts: ['a', 'b', 'c'] });
    const ending = endingOf(on, hosts, 100);
    expect(ending).toEqual({ names: 'node2, node1', left: 30, then: 'save' });
    expect(headlineOf(on, idle(2), ending)).toMatchObject({
      state: 'walltime',
      text: '2 ranks · the walltime of node2, node1 ends in 30 s'
    });
    expect(headlineOf(on, [aRank(0, { state: 'dead' })], ending).state).toBe('dead');
    expect(endingOf(on, hosts, 161)).toBeNull();
    expect(endingOf({ ...on, hosts: ['c'] }, hosts, 100)).toBeNull();
  });

  it('groups ranks by state and reason, the worst first', () => {
    const troubles = troublesOf([
      aRank(0, { state: 'healing', cause: 'x' }),
      aRank(1, { state: 'dead', cause: 'alone' }),
      aRank(2, { state: 'dead', cause: SIGKILL, since: 9 }),
      aRank(3, { state: 'dead', cause: SIGKILL, since: 5, host: 'h2' }),
      aRank(4)
    ]);
    expect(troubles.map(({ state, ranks }) => [state, ranks])).toEqual([
      ['dead', [2, 3]],
      ['dead', [1]],
      ['healing', [0]]
    ]);
    expect(troubles[0]).toMatchObject({ hosts: ['h1', 'h2'], since: 5, reason: SIGKILL });
  });

  it('says where a rank is stopped', () => {
    const stop = { reason: 'breakpoint', file: 'cell [7]', line: 12, function: 'step', text: '' };
    expect(describeRank(aRank(3, { state: 'stopped', stop }), 'b', 0)).toBe(
      'rank 3, stopped: breakpoint · cell [7], line 12, on b'
    );
  });

  it('says of a rank all that is to know', () => {
    const rank = aRank(3, {
      state: 'running',
      doing: 'trainer.step',
      doing_since: 86,
      waiting: 2,
      rss: 1.4e9,
      older: true
    });
    expect(describeRank(rank, 'b', 100)).toBe(
      'rank 3, running, trainer.step · 14 s, 2 messages wait, modules of an older tree, 1.4 GB, on b'
    );
  });

  it('groups failures, the latest first', () => {
    const failure = (number: number, rank: number, text: string) =>
      ({ number, time: number, mesh: 'u1', ranks: [rank], kind: 'death', text }) as const;
    const groups = groupFailures([failure(1, 3, SIGKILL), failure(2, 1, 'other'), failure(3, 5, SIGKILL)]);
    expect(groups.map(({ text, ranks, count, last }) => [text, ranks, count, last])).toEqual([
      [SIGKILL, [3, 5], 2, 3],
      ['other', [1], 1, 2]
    ]);
  });

  it('has hosts in the order of their first ranks', () => {
    const ranks = [aRank(0, { host: 'b' }), aRank(1, { host: 'a' }), aRank(2, { host: 'b' })];
    expect(byHost(ranks)).toEqual([
      { host: 'b', ranks: [0, 2] },
      { host: 'a', ranks: [1] }
    ]);
  });
});

describe('translation', () => {
  afterEach(() => useTranslation());

  it('fills values in, and leaves other signs of percent alone', () => {
    expect(t('%1 % of %2', 50, 96)).toBe('50 % of 96');
    expect(t('%mesh up')).toBe('%mesh up');
    expect([tn('%1 rank', '%1 ranks', 1), tn('%1 rank', '%1 ranks', 2)]).toEqual(['1 rank', '2 ranks']);
  });

  it('uses the bundle of the front end', () => {
    useTranslation({ __: text => text.toUpperCase(), _n: (_one, many) => many });
    expect(t('idle')).toBe('IDLE');
    expect(headlineOf(undefined, [aRank(0)]).news).toBe('IDLE');
  });
});
