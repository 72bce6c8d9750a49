import type { RequestError } from './feed';
import type { Answers, Deed, Done, LogMessage, Options, PointsMessage, Question } from './messages';

/** Ends something that goes on: a subscription, a followed log. To call it twice does no harm. */
export type Dispose = () => void;

/** An expression that is plotted over ranks; none named: all. `period` is in seconds. */
export interface PlotRequest {
  readonly mesh: string;
  readonly ranks?: readonly number[];
  readonly expression: string;
  readonly period: number;
}

/** What views ask of the kernel; a `FeedClient` does it. */
export interface Actions {
  /** Ask for something that is not in the store; rejects with a `RequestError`. */
  ask<Q extends Question>(what: Q, mesh: string, ranks: readonly number[], options?: Options): Promise<Answers[Q]>;

  /** Have something done; rejects with a `RequestError`. */
  perform(what: Deed, mesh: string, ranks: readonly number[], options?: Options): Promise<Done>;

  /** Lines of the logs of ranks (none named: of all), as they come; `failed` is told if there will be none. */
  follow(
    mesh: string,
    ranks: readonly number[],
    search: string,
    heard: (message: LogMessage) => void,
    failed?: (error: RequestError) => void
  ): Dispose;

  /** The values of an expression as they change; `failed` is told if there will be none. */
  plot(request: PlotRequest, heard: (message: PointsMessage) => void, failed?: (error: RequestError) => void): Dispose;

  /** Put code into a new cell of the notebook, where the front end can do that. */
  insertCode?(code: string): void;
}
