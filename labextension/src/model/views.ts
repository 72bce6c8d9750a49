/**
 * What a front end knows of hosts and ranks: the structs of `monarch_kernel/watch/model.py`, by the same names.
 *
 * Times are seconds since 1970 on the controller's clock; sizes are bytes. The kernel leaves fields out that have their
 * default; `complete` puts them back, so that views never meet an undefined field.
 */

/** The states of a rank, the worst first. */
export const STATES = ['dead', 'unresponsive', 'stopped', 'healing', 'starting', 'running', 'idle', 'ended'] as const;

export type RankState = (typeof STATES)[number];

/** A GPU of a host. `use` is in percent. */
export interface GpuView {
  readonly index: number;
  readonly name: string;
  readonly use: number;
  readonly memory_used: number;
  readonly memory_total: number;
}

/**
 * A host. `cpu` is in percent of all its processors; `gone` says why it cannot be reached; `ends_at` is when its walltime
 * ends, if that is soon (0: it is not), and `then` what is to be done before.
 */
export interface HostView {
  readonly key: string;
  readonly name: string;
  readonly cores: number;
  readonly cpu: number;
  readonly memory_used: number;
  readonly memory_total: number;
  readonly gpus: readonly GpuView[];
  readonly tree: string;
  readonly environment: string;
  readonly gone: string;
  readonly ends_at: number;
  readonly then: string;
}

/** An actor in one rank. */
export interface ActorView {
  readonly name: string;
  readonly cls: string;
  readonly endpoint: string;
  readonly since: number;
  readonly waiting: number;
  readonly calls: number;
  readonly failures: number;
}

/** Where a rank is stopped in the debugger. */
export interface StopView {
  readonly reason: string;
  readonly file: string;
  readonly line: number;
  readonly function: string;
  readonly text: string;
}

/** A rank of a proc mesh. `cpu` is in percent of one processor. */
export interface RankView {
  readonly mesh: string;
  readonly rank: number;
  readonly host: string;
  readonly proc: string;
  readonly pid: number;
  readonly state: RankState;
  readonly since: number;
  readonly cause: string;
  readonly doing: string;
  readonly doing_since: number;
  readonly waiting: number;
  readonly calls: number;
  readonly failures: number;
  readonly sent: number;
  readonly received: number;
  readonly rss: number;
  readonly cpu: number;
  readonly gpu_memory: Readonly<Record<string, number>>;
  readonly started: number;
  readonly stop: StopView | null;
  readonly older: boolean;
  readonly actors: readonly ActorView[];
}

/** A proc mesh. `hang` is the verdict of the hang detector, or empty. */
export interface MeshView {
  readonly key: string;
  readonly name: string;
  readonly labels: readonly string[];
  readonly sizes: readonly number[];
  readonly hosts: readonly string[];
  readonly current: boolean;
  readonly kept: string;
  readonly hang: string;
  readonly created: number;
}

/**
 * A job: hosts that an engine gives, or is to give. `mesh` is the mesh of the notebook that is on it, `reason` says in
 * the engine's words why hosts are not up, `error` why it does not say where it is.
 */
export interface JobView {
  readonly key: string;
  readonly engine: string;
  readonly mesh: string;
  readonly hosts: number;
  readonly up: number;
  readonly reason: string;
  readonly since: number;
  readonly expected_start: number;
  readonly ends_at: number;
  readonly ended: boolean;
  readonly used_by: string;
  readonly error: string;
}

/** Something that went wrong. */
export interface FailureView {
  readonly number: number;
  readonly time: number;
  readonly mesh: string;
  readonly ranks: readonly number[];
  readonly kind: 'death' | 'error' | 'hang' | 'unresponsive' | 'walltime';
  readonly text: string;
}

/** A view as it arrives: fields that have their default may be left out. */
export type Sent<View> = Partial<View>;

const GPU: GpuView = { index: 0, name: '', use: 0, memory_used: 0, memory_total: 0 };
const ACTOR: ActorView = { name: '', cls: '', endpoint: '', since: 0, waiting: 0, calls: 0, failures: 0 };
const STOP: StopView = { reason: '', file: '', line: 0, function: '', text: '' };
const HOST: HostView = {
  key: '',
  name: '',
  cores: 0,
  cpu: 0,
  memory_used: 0,
  memory_total: 0,
  gpus: [],
  tree: '',
  environment: '',
  gone: '',
  ends_at: 0,
  then: ''
};
const JOB: JobView = {
  key: '',
  engine: '',
  mesh: '',
  hosts: 0,
  up: 0,
  reason: '',
  since: 0,
  expected_start: 0,
  ends_at: 0,
  ended: false,
  used_by: '',
  error: ''
};
const MESH: MeshView = {
  key: '',
  name: '',
  labels: [],
  sizes: [],
  hosts: [],
  current: false,
  kept: '',
  hang: '',
  created: 0
};
const RANK: RankView = {
  mesh: '',
  rank: 0,
  host: '',
  proc: '',
  pid: 0,
  state: 'starting',
  since: 0,
  cause: '',
  doing: '',
  doing_since: 0,
  waiting: 0,
  calls: 0,
  failures: 0,
  sent: 0,
  received: 0,
  rss: 0,
  cpu: 0,
  gpu_memory: {},
  started: 0,
  stop: null,
  older: false,
  actors: []
};

export function completeHost(sent: Sent<HostView>): HostView {
  return { ...HOST, ...sent, gpus: (sent.gpus ?? []).map(gpu => ({ ...GPU, ...gpu })) };
}

export function completeJob(sent: Sent<JobView>): JobView {
  return { ...JOB, ...sent };
}

export function completeMesh(sent: Sent<MeshView>): MeshView {
  return { ...MESH, ...sent };
}

/** A rank from all its fields, or (with `old`) from those that differ. */
export function completeRank(sent: Sent<RankView>, old: RankView = RANK): RankView {
  const rank = { ...old, ...sent };
  if (sent.stop) {
    rank.stop = { ...STOP, ...sent.stop };
  }
  if (sent.actors) {
    rank.actors = sent.actors.map(actor => ({ ...ACTOR, ...actor }));
  }
  return rank;
}
