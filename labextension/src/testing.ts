/** What several unit tests need: views of ranks, and a DOM as far as jsdom lacks one. */

import type {
  Actions,
  Answers,
  Deed,
  Dispose,
  Done,
  LogMessage,
  Options,
  PlotRequest,
  PointsMessage,
  Question,
  RankView,
  Sent
} from './model';
import { completeRank } from './model';

/** A rank; by default an idle one of mesh "u1" on host "h1". */
export function aRank(rank: number, fields: Sent<RankView> = {}): RankView {
  return completeRank({ mesh: 'u1', rank, host: 'h1', state: 'idle', ...fields });
}

/** A snapshot of one mesh. */
export function aSnapshot(ranks: readonly RankView[], version = 1, time = 100) {
  const hosts = [...new Set(ranks.map(rank => rank.host))];
  return {
    kind: 'snapshot' as const,
    version,
    time,
    meshes: [{ key: 'u1', name: 'm', labels: ['gpus'], sizes: [ranks.length], hosts }],
    hosts: hosts.map(key => ({ key, name: `name-of-${key}` })),
    ranks: { u1: [...ranks] },
    failures: []
  };
}

interface Asked {
  what: string;
  mesh: string;
  ranks: readonly number[];
  options: Options;
  answer: (value: unknown) => void;
  refuse: (error: Error) => void;
}

/** Actions that a test answers. */
export class AnsweredActions implements Actions {
  readonly asked: Asked[] = [];
  readonly followed: ((message: LogMessage) => void)[] = [];
  readonly plotted: ((message: PointsMessage) => void)[] = [];
  ended = 0;

  ask<Q extends Question>(what: Q, mesh: string, ranks: readonly number[], options: Options = {}) {
    return this._ask(what, mesh, ranks, options) as Promise<Answers[Q]>;
  }

  perform(what: Deed, mesh: string, ranks: readonly number[], options: Options = {}) {
    return this._ask(what, mesh, ranks, options) as Promise<Done>;
  }

  follow(_mesh: string, _ranks: readonly number[], _search: string, heard: (message: LogMessage) => void): Dispose {
    this.followed.push(heard);
    return () => void this.ended++;
  }

  plot(_request: PlotRequest, heard: (message: PointsMessage) => void): Dispose {
    this.plotted.push(heard);
    return () => void this.ended++;
  }

  last(): Asked {
    const last = this.asked.at(-1);
    if (!last) {
      throw new Error('nothing was asked');
    }
    return last;
  }

  private _ask(what: string, mesh: string, ranks: readonly number[], options: Options): Promise<unknown> {
    return new Promise((answer, refuse) => this.asked.push({ what, mesh, ranks, options, answer, refuse }));
  }
}

/** The element that matches, or an error. */
export function find<E extends HTMLElement>(root: ParentNode, selector: string): E {
  const found = root.querySelector<E>(selector);
  if (!found) {
    throw new Error(`nothing matches ${selector}`);
  }
  return found;
}

/** After promises that are settled have told so, and a frame has been drawn. */
export async function settled(): Promise<void> {
  await new Promise(resolve => setTimeout(resolve, 0));
  await new Promise(resolve => requestAnimationFrame(resolve));
}

/** What jsdom lacks and views need: canvases draw nothing, and scrolled areas have a size. */
export function completeDom(width = 600, height = 400): void {
  HTMLCanvasElement.prototype.getContext = () => null;
  for (const [name, value] of [
    ['clientWidth', width],
    ['clientHeight', height]
  ] as const) {
    Object.defineProperty(HTMLElement.prototype, name, { configurable: true, get: () => value });
  }
}
