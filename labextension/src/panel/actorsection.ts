import type { MeshStore, RankView } from '../model';
import { nameRanks, t, tn } from '../model';
import { element, setCutText, setText } from '../views/dom';
import type { SectionContent } from './section';

/** An actor mesh, put together from the actors of its ranks. */
export interface ActorSummary {
  readonly name: string;
  readonly cls: string;
  readonly ranks: readonly number[];
  /** Endpoints that run now, each with the number of ranks that it runs on, the most first. */
  readonly running: readonly (readonly [endpoint: string, ranks: number])[];
  readonly waiting: number;
  readonly calls: number;
  readonly failures: number;
}

/** The actors of ranks by name and class. */
export function summarizeActors(ranks: readonly RankView[]): ActorSummary[] {
  interface Sum {
    name: string;
    cls: string;
    ranks: number[];
    running: Map<string, number>;
    waiting: number;
    calls: number;
    failures: number;
  }
  const sums = new Map<string, Sum>();
  for (const { rank, actors } of ranks) {
    for (const actor of actors) {
      const key = `${actor.name}\n${actor.cls}`;
      const sum = sums.get(key) ?? {
        name: actor.name,
        cls: actor.cls,
        ranks: [],
        running: new Map<string, number>(),
        waiting: 0,
        calls: 0,
        failures: 0
      };
      sums.set(key, sum);
      sum.ranks.push(rank);
      if (actor.endpoint) {
        sum.running.set(actor.endpoint, (sum.running.get(actor.endpoint) ?? 0) + 1);
      }
      sum.waiting += actor.waiting;
      sum.calls += actor.calls;
      sum.failures += actor.failures;
    }
  }
  return [...sums.values()]
    .map(sum => ({ ...sum, running: [...sum.running].sort((a, b) => b[1] - a[1]) }))
    .sort((a, b) => a.name.localeCompare(b.name) || a.cls.localeCompare(b.cls));
}

/** The actors of a mesh. */
export class ActorSection implements SectionContent {
  private readonly _list = element('ul', 'mk-List');
  private readonly _note = element('div', 'mk-Note', {}, t('No actor is spawned on this mesh.'));

  constructor(
    host: HTMLElement,
    private readonly _store: MeshStore,
    private readonly _mesh: string
  ) {
    host.append(this._list, this._note);
    this.update();
  }

  update(): void {
    const actors = summarizeActors(this._store.ranks(this._mesh));
    this._note.hidden = actors.length > 0;
    while (this._list.children.length > actors.length) {
      this._list.lastElementChild?.remove();
    }
    actors.forEach((actor, index) => {
      let item = this._list.children[index];
      if (!item) {
        const parts = ['name', 'runs', 'facts', 'failed'].map(part => element('span', `mk-Actors-${part}`));
        item = element('li', 'mk-Actors-item', {}, ...parts);
        this._list.append(item);
      }
      const [name, runs, facts, failed] = [...item.children] as HTMLElement[];
      if (!name || !runs || !facts || !failed) {
        return;
      }
      setText(name, actor.name);
      name.title = actor.cls ? `${actor.name}: ${actor.cls}` : actor.name;
      const running = actor.running.map(([endpoint, ranks]) =>
        actor.running.length === 1 && ranks === actor.ranks.length ? endpoint : `${endpoint} × ${ranks}`
      );
      setCutText(runs, running.join(', ') || t('idle'));
      const waiting = actor.waiting ? tn('%1 message waits', '%1 messages wait', actor.waiting) : '';
      const calls = tn('%1 call', '%1 calls', actor.calls);
      setCutText(facts, [nameRanks(actor.ranks), calls, waiting].filter(Boolean).join(' · '));
      setText(failed, actor.failures ? t('%1 failed', actor.failures) : '');
    });
  }

  dispose(): void {
    // It holds nothing but its elements.
  }
}
