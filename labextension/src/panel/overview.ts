import type { ConnectionSource } from '../views/board';
import type { Actions, MeshStore, Point } from '../model';
import { t } from '../model';
import { MeshBoard } from '../views/board';
import { LineChart } from '../views/chart';
import { button, Disposables, element, setAttribute } from '../views/dom';

/** How often memory and processor time are noted (seconds). */
const SAMPLE = 1;
/** How often the values of an expression are wanted (seconds). */
const PERIOD = 0.5;
const MEGA = 1e6;

let overviews = 0;

/** One mesh with room: its ranks, what they use over time, and expressions that the person draws. */
export class MeshOverview {
  readonly node = element('div', 'mk-Overview');
  private readonly _board: MeshBoard;
  private readonly _charts = element('div', 'mk-Overview-charts');
  private readonly _expression = element('input', '', { type: 'text', spellcheck: 'false', placeholder: 'loss' });
  private readonly _used: readonly { chart: LineChart; of: (rank: Used) => number }[];
  private readonly _drawn = new Set<LineChart>();
  private readonly _disposables = new Disposables();
  private _sampled = -Infinity;

  constructor(
    host: HTMLElement,
    private readonly _store: MeshStore,
    private readonly _actions: Actions,
    private readonly _connection: ConnectionSource,
    private readonly _mesh: string
  ) {
    const left = element('div', 'mk-Overview-board');
    this._board = new MeshBoard(left, _store, _actions, { mesh: _mesh, connection: _connection });
    const id = `mk-overview-${overviews++}`;
    this._expression.id = id;
    const form = element(
      'form',
      'mk-Overview-form',
      { autocomplete: 'off' },
      element('label', '', { for: id }, t('Draw an expression of ranks')),
      this._expression,
      element('button', 'mk-Button', { type: 'submit' }, t('Draw'))
    );
    this._disposables.listen(form, 'submit', (event: Event) => {
      event.preventDefault();
      this._draw(this._expression.value.trim());
    });
    this._used = [
      { chart: new LineChart(this._charts, t('Memory (MB)')), of: rank => rank.rss / MEGA },
      { chart: new LineChart(this._charts, t('Processor (%)')), of: rank => rank.cpu }
    ];
    this.node.append(left, element('div', 'mk-Overview-plots', {}, form, this._charts));
    host.append(this.node);
    this._disposables.add(_store.subscribe(() => this._sample()));
    this._disposables.add(_connection.onConnection(() => this._connected()));
    this._sample();
    this._connected();
  }

  /** It has been put into the page, or is shown again. */
  refresh(): void {
    this._board.refresh();
  }

  dispose(): void {
    this._disposables.dispose();
    this._board.dispose();
    this._all().forEach(chart => chart.dispose());
    this.node.remove();
  }

  private _all(): LineChart[] {
    return [...this._used.map(({ chart }) => chart), ...this._drawn];
  }

  private _connected(): void {
    const gone = this._connection.connection === 'gone';
    setAttribute(this.node, 'data-gone', gone);
    this._all().forEach(chart => chart.setGone(gone));
  }

  /** Note what living ranks use now. */
  private _sample(): void {
    const now = this._store.now();
    const ranks = this._store
      .ranks(this._mesh)
      .filter(({ state, rss }) => rss && state !== 'dead' && state !== 'ended');
    if (!ranks.length || now - this._sampled < SAMPLE) {
      return;
    }
    this._sampled = now;
    for (const { chart, of } of this._used) {
      chart.push(
        now,
        ranks.map((rank): Point => [rank.rank, of(rank)])
      );
    }
  }

  private _draw(expression: string): void {
    if (!expression) {
      this._expression.focus();
      return;
    }
    const plot = { mesh: this._mesh, expression, period: PERIOD };
    const chart = new LineChart(this._charts, expression, this._actions, plot);
    const remove = button('mk-Button mk-Overview-remove', '×', () => {
      this._drawn.delete(chart);
      chart.dispose();
      this._expression.focus();
    });
    remove.setAttribute('aria-label', t('Remove the plot of %1', expression));
    chart.node.prepend(remove);
    this._drawn.add(chart);
    this._expression.value = '';
    chart.node.scrollIntoView?.({ block: 'nearest' });
  }
}

/** What a rank uses, as its host reports. */
interface Used {
  readonly rss: number;
  readonly cpu: number;
}
