/** The messages between a kernel and a front end (`docs/watching.md`, "The feed"). */

import type { FailureView, HostView, JobView, MeshView, RankView, Sent } from './views';

export interface SnapshotMessage {
  kind: 'snapshot';
  version: number;
  time: number;
  meshes: Sent<MeshView>[];
  hosts: Sent<HostView>[];
  /** By mesh, each at the index of its rank. */
  ranks: Record<string, Sent<RankView>[]>;
  failures: FailureView[];
  /** Those whose hosts the notebook waits for. */
  jobs?: Sent<JobView>[];
}

export interface ChangesMessage {
  kind: 'changes';
  base: number;
  version: number;
  time: number;
  meshes?: Sent<MeshView>[];
  hosts?: Sent<HostView>[];
  /** By mesh and rank, only the fields that differ. */
  ranks?: Record<string, Record<string, Sent<RankView>>>;
  jobs?: Sent<JobView>[];
  gone?: { meshes?: string[]; hosts?: string[]; jobs?: string[] };
  failures?: FailureView[];
}

/** The answer to a lease: the controller's clock, and the version that the front end should have by now. */
export interface AliveMessage {
  kind: 'alive';
  time: number;
  version: number;
}

/** Why something that was asked or done failed, in words, and what to do next. */
export interface Refusal {
  message: string;
  hint?: string;
}

export interface AnswerMessage {
  kind: 'answer';
  id: string;
  value?: unknown;
  error?: Refusal;
}

/** A line of a log: the rank, the stream ("stdout", "stderr"), and the text. */
export type LogLine = [rank: number, stream: string, text: string];

export interface LogMessage {
  kind: 'log';
  id: string;
  lines: LogLine[];
  dropped: number;
}

/** A number of one rank; null stands for NaN and the infinities, which JSON has not. */
export type Point = [rank: number, value: number | null];

export interface PointsMessage {
  kind: 'points';
  id: string;
  time: number;
  values: Point[];
  /** A sentence about ranks that have no number; empty once all have. */
  error?: string;
  /** The plot has ended by itself: nothing follows. */
  ended?: boolean;
}

export interface NoticeMessage {
  kind: 'notice';
  level: 'info' | 'warning' | 'error';
  mesh: string;
  text: string;
}

export type KernelMessage =
  SnapshotMessage | ChangesMessage | AliveMessage | AnswerMessage | LogMessage | PointsMessage | NoticeMessage;

/** What `ask` may ask; nothing of it changes anything. */
export type Question = 'stack' | 'log' | 'variables' | 'breakpoints' | 'hang' | 'code' | 'jobs';

/** What `do` may do. */
export type Deed =
  | 'interrupt'
  | 'kill'
  | 'heal'
  | 'debug'
  | 'undebug'
  | 'focus'
  | 'resume'
  | 'use'
  | 'sync'
  | 'down'
  | 'restart'
  | 'up'
  | 'attach'
  | 'stop_kept'
  | 'kill_job';

/** Further fields of a request, as the table of `docs/watching.md` names them. */
export type Options = Readonly<Record<string, unknown>>;

export type FrontEndMessage =
  | { kind: 'lease'; period: number }
  | { kind: 'again' }
  | ({ kind: 'ask'; id: string; what: Question; mesh: string; ranks: readonly number[] } & Options)
  | ({ kind: 'do'; id: string; what: Deed; mesh: string; ranks: readonly number[] } & Options)
  | { kind: 'follow'; id: string; mesh: string; ranks: readonly number[]; search: string }
  | { kind: 'unfollow'; id: string }
  | { kind: 'plot'; id: string; mesh: string; ranks: readonly number[]; expression: string; period: number }
  | { kind: 'unplot'; id: string };

/** A frame of a stack. */
export interface Frame {
  function: string;
  file: string;
  line: number;
  /** The source line. */
  text?: string;
}

/** Ranks with the same stack; the frame that runs is the last one. */
export interface StackGroup {
  ranks: number[];
  frames: Frame[];
  note?: string;
}

export interface Variable {
  name: string;
  type: string;
  text: string;
}

export interface Breakpoint {
  id: string | number;
  file: string;
  line: number;
  condition?: string;
  /** Null: all ranks. */
  ranks: number[] | null;
  text?: string;
}

/** The values of the answers, by the question. */
export interface Answers {
  stack: { stacks: StackGroup[] };
  log: { lines: LogLine[]; dropped: number };
  variables: { frame: Frame | null; variables: Variable[] };
  breakpoints: { breakpoints: Breakpoint[] };
  hang: { hangs: boolean; text: string };
  code: { code: string };
  jobs: { jobs: Sent<JobView>[]; notes: string[] };
}

/** The value of the answer to any `do`: what was done, in a sentence. */
export interface Done {
  text: string;
}
