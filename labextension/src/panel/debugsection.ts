import type { Actions, Breakpoint, MeshStore, RankView } from '../model';
import { formatRanks, nameRanks, t, tn } from '../model';
import { button, Disposables, element, moveByArrows, setAttribute, setText } from '../views/dom';
import { stateIcon } from '../views/glyphs';
import { wordsOf } from './actionbar';
import type { SectionContent } from './section';
import type { Surroundings } from './surroundings';

/** How often breakpoints are asked for while a person can see them: cells and other viewers set some, too (ms). */
const AGAIN = 3_000;
/** Stopped ranks that have a button each; of more, the person names one. */
const LISTED = 64;

/** Ranks that are stopped at the same place. */
export interface StopGroup {
  readonly key: string;
  readonly title: string;
  readonly text: string;
  readonly ranks: readonly number[];
}

/** The stopped ranks by place, the place with the first rank first. */
export function groupStops(ranks: readonly RankView[]): StopGroup[] {
  const groups = new Map<string, { title: string; text: string; ranks: number[] }>();
  for (const { state, stop, rank } of ranks) {
    if (state !== 'stopped' || !stop) {
      continue;
    }
    const place = stop.file ? t('%1, line %2', stop.file, stop.line) : '';
    const title = [stop.reason, place, stop.function].filter(Boolean).join(' · ');
    const key = `${title}\n${stop.text}`;
    const group = groups.get(key);
    if (group) {
      group.ranks.push(rank);
    } else {
      groups.set(key, { title, text: stop.text, ranks: [rank] });
    }
  }
  return [...groups].map(([key, group]) => ({ key, ...group }));
}

/** The ranks that are stopped, one of which JupyterLab's own debugger shows; and the breakpoints. */
export class DebugSection implements SectionContent {
  private readonly _stops = element('div', 'mk-Stops', { role: 'radiogroup' });
  private readonly _note = element('div', 'mk-Note');
  private readonly _result = element('div', 'mk-Bar-result', { role: 'status' });
  private readonly _resume: HTMLButtonElement;
  private readonly _breakpoints = element('div', 'mk-Breakpoints');
  private readonly _disposables = new Disposables();
  private _shown = -1;
  private _look = '';
  private _stopCount = 0;
  private _disposed = false;
  private _asking = false;
  private _listed = '';
  private readonly _timer: ReturnType<typeof setInterval>;

  constructor(
    host: HTMLElement,
    private readonly _store: MeshStore,
    private readonly _actions: Actions,
    private readonly _surroundings: Surroundings,
    private readonly _mesh: string
  ) {
    this._stops.setAttribute('aria-label', t('The rank that the debugger shows'));
    moveByArrows(this._stops, () => [...this._stops.querySelectorAll('button')], this._disposables);
    this._resume = button('mk-Button', t('Continue all'), () => void this._continue());
    host.append(
      this._note,
      this._stops,
      element('div', 'mk-Bar-row', {}, this._resume),
      this._result,
      element('h3', 'mk-Heading', {}, t('Breakpoints')),
      this._breakpoints
    );
    this.update();
    this._askBreakpoints();
    this._timer = setInterval(() => {
      if (!document.hidden && !host.closest('[hidden]')) {
        this._askBreakpoints();
      }
    }, AGAIN);
  }

  update(): void {
    const groups = groupStops(this._store.ranks(this._mesh));
    const ranks = groups.flatMap(group => group.ranks);
    if (!ranks.includes(this._shown)) {
      this._shown = -1;
    }
    setText(
      this._note,
      ranks.length
        ? t('Choose the rank that the debugger of JupyterLab shows.')
        : t('No rank is stopped. Ranks stop at breakpoints in cells while the debugger is on.')
    );
    setAttribute(this._resume, 'hidden', !ranks.length);
    const look = JSON.stringify([groups, this._shown]);
    if (look !== this._look) {
      this._look = look;
      const focused = (document.activeElement as HTMLElement | null)?.dataset['rank'];
      this._stops.replaceChildren(...groups.map(group => this._group(group, ranks[0])));
      if (focused !== undefined) {
        this._stops.querySelector<HTMLElement>(`[data-rank="${focused}"]`)?.focus();
      }
    }
    if (ranks.length !== this._stopCount) {
      this._stopCount = ranks.length;
      this._askBreakpoints();
    }
  }

  /** Show the next stopped rank after the one that is shown. */
  next(): void {
    const ranks = groupStops(this._store.ranks(this._mesh))
      .flatMap(group => group.ranks)
      .sort((a, b) => a - b);
    const rank = ranks.find(each => each > this._shown) ?? ranks[0];
    if (rank !== undefined) {
      void this._focus(rank);
    }
  }

  dispose(): void {
    this._disposed = true;
    clearInterval(this._timer);
    this._disposables.dispose();
  }

  private _group({ title, text, ranks }: StopGroup, first: number | undefined): HTMLElement {
    const chips = element('div', 'mk-Stops-ranks');
    for (const rank of ranks.slice(0, LISTED)) {
      const chip = button('mk-Stops-rank', String(rank), () => void this._focus(rank), {
        role: 'radio',
        'aria-checked': String(rank === this._shown),
        'aria-label': t('rank %1, %2', rank, title),
        'data-rank': rank
      });
      chip.tabIndex = rank === this._shown || (this._shown < 0 && rank === first) ? 0 : -1;
      chips.append(chip);
    }
    const rest = ranks.slice(LISTED);
    if (rest.length) {
      chips.append(element('span', 'mk-Faint', {}, t('and %1', formatRanks(rest))));
    }
    const node = element(
      'div',
      'mk-Stops-group',
      {},
      element('div', 'mk-Stops-title', { title }, stateIcon('stopped'), element('span', '', {}, title)),
      chips
    );
    if (text) {
      node.insertBefore(element('div', 'mk-Stops-text', { title: text }, text), chips);
    }
    return node;
  }

  private async _focus(rank: number): Promise<void> {
    try {
      await this._surroundings.focusRank(this._store.meshes.get(this._mesh)?.name ?? '', rank);
      this._shown = rank;
      this._say('');
    } catch (error) {
      this._say(wordsOf(error), true);
    }
    if (!this._disposed) {
      this.update();
    }
  }

  private async _continue(): Promise<void> {
    try {
      this._say((await this._actions.perform('resume', this._mesh, [])).text);
    } catch (error) {
      this._say(wordsOf(error), true);
    }
  }

  private _askBreakpoints(): void {
    if (this._asking) {
      return;
    }
    this._asking = true;
    this._actions
      .ask('breakpoints', this._mesh, [])
      .then(
        ({ breakpoints }) => this._showBreakpoints(breakpoints),
        (error: unknown) => {
          this._listed = '';
          this._breakpoints.replaceChildren(element('div', 'mk-Faint', {}, wordsOf(error)));
        }
      )
      .finally(() => (this._asking = false));
  }

  private _showBreakpoints(breakpoints: readonly Breakpoint[]): void {
    const listed = JSON.stringify(breakpoints);
    if (this._disposed || listed === this._listed) {
      return;
    }
    this._listed = listed;
    if (!breakpoints.length) {
      this._breakpoints.replaceChildren(element('div', 'mk-Faint', {}, t('None are set.')));
      return;
    }
    const rows = breakpoints.map(({ file, line, condition, ranks, text }) => {
      const place = t('%1, line %2', file, line);
      const rest = [condition ? t('if %1', condition) : '', ranks ? nameRanks(ranks) : ''].filter(Boolean).join(' · ');
      return element(
        'li',
        'mk-Breakpoints-item',
        { title: text || place },
        element('span', 'mk-Breakpoints-dot', { 'aria-hidden': 'true' }),
        element('span', 'mk-Breakpoints-place', {}, place),
        ...(rest ? [element('span', 'mk-Faint', {}, rest)] : [])
      );
    });
    this._breakpoints.replaceChildren(
      element('ul', 'mk-List', { 'aria-label': tn('%1 breakpoint', '%1 breakpoints', rows.length) }, ...rows)
    );
  }

  private _say(text: string, bad = false): void {
    setText(this._result, text);
    setAttribute(this._result, 'data-bad', bad);
  }
}
