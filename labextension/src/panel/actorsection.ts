import type { MeshStore, RankView } from '../model';
import { formatRanks, t } from '../model';
import { element, setText } from '../views/dom';
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

/** A table of the actors of a mesh. */
export class ActorSection implements SectionContent {
  private readonly _rows = element('tbody');
  private readonly _note = element('div', 'mk-Note', {}, t('No actor is spawned on this mesh.'));
  private readonly _table: HTMLTableElement;

  constructor(
    host: HTMLElement,
    private readonly _store: MeshStore,
    private readonly _mesh: string
  ) {
    const head = element('tr');
    for (const name of [t('Actor'), t('Ranks'), t('Runs'), t('Waiting'), t('Calls'), t('Failed')]) {
      head.append(element('th', '', { scope: 'col' }, name));
    }
    this._table = element('table', 'mk-Table mk-Actors', {}, element('thead', '', {}, head), this._rows);
    host.append(this._table, this._note);
    this.update();
  }

  update(): void {
    const actors = summarizeActors(this._store.ranks(this._mesh));
    this._table.hidden = !actors.length;
    this._note.hidden = actors.length > 0;
    while (this._rows.rows.length > actors.length) {
      this._rows.deleteRow(-1);
    }
    actors.forEach((actor, index) => {
      let row = this._rows.rows[index];
      if (!row) {
        row = this._rows.insertRow();
        row.append(element('th', '', { scope: 'row' }), ...Array.from({ length: 5 }, () => element('td')));
      }
      const runs = actor.running.map(([endpoint, ranks]) =>
        actor.running.length === 1 && ranks === actor.ranks.length ? endpoint : `${endpoint} × ${ranks}`
      );
      const cells = [
        actor.name,
        formatRanks(actor.ranks),
        runs.join(', ') || '–',
        String(actor.waiting),
        String(actor.calls),
        String(actor.failures)
      ];
      cells.forEach((text, column) => {
        const cell = row.cells[column];
        if (cell) {
          setText(cell, text);
          cell.title = column === 0 && actor.cls ? `${actor.name}: ${actor.cls}` : text;
        }
      });
      row.cells[5]?.toggleAttribute('data-alarm', actor.failures > 0);
    });
  }

  dispose(): void {
    // It holds nothing but its elements.
  }
}
