/** What is said of many ranks in few words. */

import { duration, memory, wholeDuration } from './quantities';
import { formatRanks } from './rankset';
import { t, tn } from './translation';
import type { FailureView, HostView, JobView, MeshView, RankState, RankView } from './views';
import { STATES } from './views';

/** How many ranks are in each state; `older`: how many of all have modules of an older tree. */
export interface Counts {
  readonly total: number;
  readonly older: number;
  readonly states: Readonly<Record<RankState, number>>;
}

export function countStates(ranks: Iterable<RankView>): Counts {
  const states = Object.fromEntries(STATES.map(state => [state, 0])) as Record<RankState, number>;
  let total = 0;
  let older = 0;
  for (const rank of ranks) {
    states[rank.state]++;
    total++;
    older += rank.older ? 1 : 0;
  }
  return { total, older, states };
}

/** The state in words. */
export function stateName(state: RankState): string {
  switch (state) {
    case 'dead':
      return t('dead');
    case 'unresponsive':
      return t('unresponsive');
    case 'stopped':
      return t('stopped');
    case 'healing':
      return t('healing');
    case 'starting':
      return t('starting');
    case 'running':
      return t('running');
    case 'idle':
      return t('idle');
    case 'ended':
      return t('ended');
  }
}

/** Why a rank is in its state, if that is to say: its cause, or where it is stopped. */
export function reasonOf(rank: RankView): string {
  if (rank.state !== 'stopped' || !rank.stop) {
    return rank.cause;
  }
  const { reason, file, line, function: name, text } = rank.stop;
  const place = file ? t('%1, line %2', file, line) : name;
  return [reason, place, text].filter(Boolean).join(' · ');
}

/** Ranks in a state that calls for attention, for the same reason. */
export interface Trouble {
  readonly state: RankState;
  readonly reason: string;
  readonly ranks: readonly number[];
  readonly hosts: readonly string[];
  /** When the first of them came into it. */
  readonly since: number;
}

/** Whether there is something to interrupt: also at a breakpoint, and on a rank that does not answer. */
export function runsSomething({ state, doing }: RankView): boolean {
  return state === 'running' || state === 'unresponsive' || state === 'stopped' || (!!doing && !isOver(state));
}

function isOver(state: RankState): boolean {
  return state === 'dead' || state === 'ended';
}

const TROUBLES: readonly RankState[] = ['dead', 'unresponsive', 'stopped', 'healing'];

export function isTrouble(state: RankState): boolean {
  return TROUBLES.includes(state);
}

/** The ranks that call for attention, grouped by state and reason: the worst first, of those the most. */
export function troublesOf(ranks: Iterable<RankView>): Trouble[] {
  const groups = new Map<string, { state: RankState; reason: string; members: RankView[] }>();
  for (const rank of ranks) {
    if (isTrouble(rank.state)) {
      const reason = reasonOf(rank);
      const key = `${rank.state} ${reason}`;
      const group = groups.get(key);
      if (group) {
        group.members.push(rank);
      } else {
        groups.set(key, { state: rank.state, reason, members: [rank] });
      }
    }
  }
  return [...groups.values()]
    .map(({ state, reason, members }) => ({
      state,
      reason,
      ranks: members.map(rank => rank.rank),
      hosts: [...new Set(members.map(rank => rank.host))],
      since: members.reduce((first, rank) => Math.min(first, rank.since), Infinity)
    }))
    .sort((a, b) => STATES.indexOf(a.state) - STATES.indexOf(b.state) || b.ranks.length - a.ranks.length);
}

/** The headline of a mesh: `text` is all of it; the state is that of the worst news, for its colour. */
export interface Headline {
  readonly state: RankState | 'hang' | 'walltime' | '';
  readonly count: string;
  readonly news: string;
  readonly text: string;
}

/** The walltime of hosts of a mesh ends soon: of which, in how many seconds, and what to do. */
export interface Ending {
  readonly names: string;
  readonly left: number;
  readonly then: string;
}

/** What ends first of the hosts of a mesh whose walltime ends soon; null: none does, or it is over. */
export function endingOf(mesh: MeshView | undefined, hosts: ReadonlyMap<string, HostView>, now: number): Ending | null {
  const ending = (mesh?.hosts ?? [])
    .map(key => hosts.get(key))
    .filter(host => host !== undefined)
    .filter(host => host.ends_at > now && !host.gone)
    .sort((a, b) => a.ends_at - b.ends_at);
  const first = ending[0];
  return first
    ? { names: few(ending.map(host => host.name || host.key)), left: first.ends_at - now, then: first.then }
    : null;
}

/** How many names are told. */
const FEW = 4;

function few(names: readonly string[]): string {
  const shown = names.slice(0, FEW).join(', ');
  return names.length > FEW ? t('%1 and %2 more', shown, names.length - FEW) : shown;
}

/** `the walltime of node1 ends in 3 min 5 s`. */
export function endingText({ names, left }: Ending): string {
  return t('the walltime of %1 ends in %2', names, wholeDuration(left));
}

/** `1 of 4 hosts up · Resources · for 3 min 5 s · expected in 20 min 0 s`. */
export function jobText(job: JobView, now: number): string {
  if (job.error) {
    return job.error;
  }
  if (job.ended) {
    return [t('ended'), job.reason].filter(Boolean).join(' · ');
  }
  const waits = job.up < job.hosts;
  return [
    tn('%2 of %1 host up', '%2 of %1 hosts up', job.hosts, job.up),
    waits ? job.reason : '',
    waits && job.since ? t('for %1', wholeDuration(now - job.since)) : '',
    waits && job.expected_start ? t('expected in %1', wholeDuration(job.expected_start - now)) : '',
    job.ends_at ? t('walltime ends in %1', wholeDuration(job.ends_at - now)) : ''
  ]
    .filter(Boolean)
    .join(' · ');
}

/** `8 ranks · 1 dead: killed by signal 9 (SIGKILL)`. */
export function headlineOf(
  mesh: MeshView | undefined,
  ranks: readonly RankView[],
  ending: Ending | null = null
): Headline {
  const count = tn('%1 rank', '%1 ranks', ranks.length);
  const line = (state: Headline['state'], news: string) => ({
    state,
    count,
    news,
    text: news ? `${count} · ${news}` : count
  });
  const { states, total, older } = countStates(ranks);
  const parts = TROUBLES.filter(state => states[state]).map(state => `${states[state]} ${stateName(state)}`);
  if (parts.length) {
    const worst = troublesOf(ranks)[0];
    const reason = worst && worst.reason && parts.length === 1 ? `: ${worst.reason}` : '';
    return line(worst ? worst.state : '', parts.join(' · ') + reason);
  }
  if (mesh?.hang) {
    return line('hang', mesh.hang);
  }
  if (ending) {
    return line('walltime', endingText(ending));
  }
  for (const state of ['starting', 'running'] as const) {
    if (states[state]) {
      return line(
        state,
        states[state] === total ? t('all %1', stateName(state)) : `${states[state]} ${stateName(state)}`
      );
    }
  }
  if (!total) {
    return line('', '');
  }
  if (older) {
    return line('idle', t('%1 with modules of an older tree', older));
  }
  return line(states.idle ? 'idle' : 'ended', states.idle ? t('idle') : t('ended'));
}

/** The ranks of one host in a mesh. */
export interface HostGroup {
  readonly host: string;
  readonly ranks: readonly number[];
}

/** The ranks of a mesh by their hosts, in the order of their first ranks. */
export function byHost(ranks: readonly RankView[]): HostGroup[] {
  const groups = new Map<string, number[]>();
  for (const rank of ranks) {
    const group = groups.get(rank.host);
    if (group) {
      group.push(rank.rank);
    } else {
      groups.set(rank.host, [rank.rank]);
    }
  }
  return [...groups].map(([host, numbers]) => ({ host, ranks: numbers }));
}

/** What a rank does, with how long: `cell [7], line 3 · 14 s`; empty if it does nothing. */
export function doingOf(rank: RankView, now: number): string {
  if (!rank.doing) {
    return '';
  }
  return rank.doing_since ? `${rank.doing} · ${duration(Math.max(0, now - rank.doing_since))}` : rank.doing;
}

/** All of a rank in one sentence, for screen readers. */
export function describeRank(rank: RankView, hostName: string, now: number): string {
  const reason = reasonOf(rank);
  return [
    t('rank %1', rank.rank),
    reason ? `${stateName(rank.state)}: ${reason}` : stateName(rank.state),
    doingOf(rank, now),
    rank.waiting ? tn('%1 message waits', '%1 messages wait', rank.waiting) : '',
    rank.older ? t('modules of an older tree') : '',
    rank.rss ? memory(rank.rss) : '',
    hostName ? t('on %1', hostName) : ''
  ]
    .filter(Boolean)
    .join(', ');
}

/** Failures with the same kind and text, together. */
export interface FailureGroup {
  readonly kind: FailureView['kind'];
  readonly text: string;
  readonly mesh: string;
  readonly ranks: readonly number[];
  readonly count: number;
  readonly last: number;
}

/** Failures grouped by what happened, the latest group first. */
export function groupFailures(failures: readonly FailureView[]): FailureGroup[] {
  const groups = new Map<string, FailureView[]>();
  for (const failure of failures) {
    const key = `${failure.mesh} ${failure.kind} ${failure.text}`;
    const group = groups.get(key) ?? [];
    groups.set(key, group);
    group.push(failure);
  }
  return [...groups.values()]
    .flatMap(group => {
      const last = group.at(-1);
      const ranks = [...new Set(group.flatMap(failure => failure.ranks))];
      return last ? [{ ...last, ranks, count: group.length, last: last.time }] : [];
    })
    .sort((a, b) => b.last - a.last);
}

/** `rank 3`, `ranks 0-3, 7`. */
export function nameRanks(ranks: readonly number[]): string {
  return ranks.length === 1 ? t('rank %1', ranks[0]) : t('ranks %1', formatRanks(ranks));
}
