import type { FailureView, MeshStore } from '../model';

/** The failures that a person is told of. */
const TOLD: readonly FailureView['kind'][] = ['death', 'hang', 'unresponsive', 'walltime'];

/** Failures of a store that are newer than the last one that was seen. */
export class NewFailures {
  private _seen = -1;

  constructor(private readonly _store: MeshStore) {}

  /** Those that came since the last call; none of those that were there at the first. */
  take(): FailureView[] {
    const { failures, version } = this._store;
    if (version < 0) {
      return [];
    }
    const last = failures.at(-1)?.number ?? 0;
    const first = this._seen < 0;
    // A kernel that has started again counts from the start.
    const seen = last < this._seen ? 0 : this._seen;
    this._seen = last;
    return first ? [] : failures.filter(failure => failure.number > seen && TOLD.includes(failure.kind));
  }
}
