import type { Answers, Deed, Done, LogMessage, Options, PointsMessage, Question } from './messages';

/** Ends something that goes on: a subscription, a followed log. To call it twice does no harm. */
export type Dispose = () => void;

/** What views ask of the kernel; a `FeedClient` does it. */
export interface Actions {
  /** Ask for something that is not in the store; rejects with a `RequestError`. */
  ask<Q extends Question>(what: Q, mesh: string, ranks: readonly number[], options?: Options): Promise<Answers[Q]>;

  /** Have something done; rejects with a `RequestError`. */
  perform(what: Deed, mesh: string, ranks: readonly number[], options?: Options): Promise<Done>;

  /** Lines of the logs of ranks (none named: of all), as they come. */
  follow(mesh: string, ranks: readonly number[], search: string, heard: (message: LogMessage) => void): Dispose;

  /** The values of an expression on all ranks, each `period` seconds. */
  plot(mesh: string, expression: string, period: number, heard: (message: PointsMessage) => void): Dispose;

  /** Put code into a new cell of the notebook, where the front end can do that. */
  insertCode?(code: string): void;
}
