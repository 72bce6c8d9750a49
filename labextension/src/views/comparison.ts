import { figure, t, tn } from '../model';
import { button, Disposables, element, setAttribute, setCutText, setText } from './dom';
import { Theme } from './theme';

/** A tensor of a cell; a ratio of null is infinite. */
export interface ComparedTensor {
  readonly phase: string;
  readonly title: string;
  readonly micro: number;
  readonly ranks: string;
  readonly line: string;
  readonly ratio: number | null;
  readonly suggests: string;
  /** Whether an earlier difference explains it. */
  readonly consequence: boolean;
}

/** The tensors of a module in a step. */
export interface ComparedCell {
  readonly row: number;
  readonly column: number;
  /** The largest ratio to its tolerance; null: infinite. */
  readonly ratio: number | null;
  readonly tensors: readonly ComparedTensor[];
  /** How many further tensors it has. */
  readonly more: number;
}

/** A comparison of two recorded runs, as `grid_data` of monarch_kernel/numerics/comparison_view.py has it. */
export interface ComparisonData {
  readonly sentence: string;
  /** null: it is uncertain. */
  readonly equal: boolean | null;
  readonly modules: readonly string[];
  readonly steps: readonly number[];
  readonly cells: readonly ComparedCell[];
  /** Row and column of the first wrong tensor. */
  readonly first: readonly [number, number] | null;
  readonly notes: readonly string[];
}

/** The least ratio of each look of a cell, as in the HTML of comparison_view.py. */
const LEVELS = [
  ['same', 0],
  ['within', Number.MIN_VALUE],
  ['mild', 1],
  ['much', 10],
  ['most', 1000]
] as const;

type Level = (typeof LEVELS)[number][0];

/**
 * The modules × steps of a comparison: each cell has the colour of its largest ratio to the tolerance, and the ratio if
 * it is wrong; the first wrong one is outlined. A chosen cell shows its tensors. It asks the kernel nothing.
 */
export class ComparisonGrid {
  readonly node = element('div', 'mk-View mk-Comparison');
  private readonly _scroll = element('div', 'mk-Comparison-scroll');
  private readonly _details = element('section', 'mk-Comparison-details', { hidden: true });
  private readonly _title = element('div', 'mk-Comparison-title');
  private readonly _tensors = element('div', 'mk-Comparison-tensors', { tabindex: 0, role: 'region' });
  private readonly _buttons: (HTMLButtonElement | undefined)[][] = [];
  private readonly _disposables = new Disposables();
  private readonly _theme: Theme;
  private _chosen: HTMLButtonElement | undefined;
  /** The cell that is brought into view once there is one. */
  private _start: HTMLButtonElement | undefined;

  constructor(
    host: HTMLElement,
    private readonly _data: ComparisonData
  ) {
    const verdict = element('div', 'mk-Comparison-verdict', {}, _data.sentence);
    setAttribute(verdict, 'data-bad', _data.equal === false);
    this._scroll.append(this._table());
    const close = button('mk-Button mk-Details-close', '×', () => this._choose(undefined, true), {
      'aria-label': t('Close')
    });
    this._details.append(element('div', 'mk-Details-head', {}, this._title, close), this._tensors);
    const notes = _data.notes.map(note => element('div', 'mk-Note', {}, note));
    this.node.append(verdict, this._legend(), this._scroll, this._details, ...notes);
    host.append(this.node);
    this._theme = new Theme(this.node, () => undefined);
    this._disposables.listen(this.node, 'keydown', (event: KeyboardEvent) => this._keyed(event));
    const [row = 0, column = 0] = _data.first ?? [];
    this._start = this._buttons[row]?.[column] ?? this._all()[0];
    if (this._start) {
      this._start.tabIndex = 0;
    }
  }

  /** The view has been put into the page: its colours may be others, and the first wrong cell is brought into view. */
  refresh(): void {
    this._theme.refresh();
    const { _start: start, _scroll: scroll } = this;
    if (start && scroll.clientHeight) {
      scroll.scrollTop = Math.max(0, start.offsetTop - scroll.clientHeight / 2);
      scroll.scrollLeft = Math.max(0, start.offsetLeft - scroll.clientWidth / 2);
      this._start = undefined;
    }
  }

  dispose(): void {
    this._disposables.dispose();
    this._theme.dispose();
    this.node.remove();
  }

  private _legend(): HTMLElement {
    const names: Record<Level, string> = {
      same: t('the same bytes'),
      within: t('within tolerance'),
      mild: t('up to 10 times the tolerance'),
      much: t('up to 1,000 times'),
      most: t('more')
    };
    const legend = element('div', 'mk-Comparison-legend');
    for (const [level] of LEVELS) {
      const box = element('span', 'mk-Comparison-box', { 'data-level': level, 'aria-hidden': 'true' });
      legend.append(element('span', '', {}, box, names[level]));
    }
    return legend;
  }

  private _table(): HTMLElement {
    const { modules, steps, cells } = this._data;
    const head = element('tr', '', {}, element('th', '', { scope: 'col' }, t('module \\ step')));
    steps.forEach(step => head.append(element('th', '', { scope: 'col' }, String(step))));
    const body = element('tbody');
    modules.forEach((module, row) => {
      const name = element('th', '', { scope: 'row' });
      setCutText(name, module || t('(the model)'));
      body.append(element('tr', '', {}, name, ...steps.map(() => element('td'))));
      this._buttons[row] = [];
    });
    for (const cell of cells) {
      const place = body.rows[cell.row]?.cells[cell.column + 1];
      const made = this._cell(cell);
      place?.append(made);
      (this._buttons[cell.row] ??= [])[cell.column] = made;
    }
    const label = t('Modules and steps, by the ratio to the tolerance');
    return element('table', 'mk-Comparison-grid', { 'aria-label': label }, element('thead', '', {}, head), body);
  }

  private _cell(cell: ComparedCell): HTMLButtonElement {
    const ratio = cell.ratio ?? Infinity;
    const level = LEVELS.filter(([, least]) => ratio >= least).at(-1)?.[0] ?? 'same';
    const isFirst = cell.row === this._data.first?.[0] && cell.column === this._data.first[1];
    const made = button('mk-Comparison-cell', ratio > 1 ? short(ratio) : '', () => this._toggle(made, cell), {
      'data-level': level,
      'data-first': isFirst,
      'aria-pressed': 'false',
      tabindex: -1
    });
    const words = [`${this._nameOf(cell)}: ${much(cell.ratio)}`, isFirst ? t('the first wrong tensor') : ''];
    const label = words.filter(Boolean).join(', ');
    setAttribute(made, 'aria-label', label);
    setAttribute(made, 'title', label);
    return made;
  }

  private _nameOf({ row, column }: ComparedCell): string {
    const { modules, steps } = this._data;
    return t('%1, step %2', modules[row] || t('the model'), steps[column] ?? '');
  }

  private _toggle(pressed: HTMLButtonElement, cell: ComparedCell): void {
    if (pressed === this._chosen) {
      this._choose(undefined, true);
      return;
    }
    this._choose(pressed, false);
    setText(this._title, this._nameOf(cell));
    setAttribute(this._details, 'aria-label', this._nameOf(cell));
    setAttribute(this._tensors, 'aria-label', t('Tensors of %1', this._nameOf(cell)));
    const more = cell.more
      ? tn('and %1 more tensor that is closer', 'and %1 more tensors that are closer', cell.more)
      : '';
    this._tensors.replaceChildren(
      ...(cell.tensors.length ? [tensorTable(cell.tensors)] : []),
      element('div', 'mk-Faint', {}, more)
    );
  }

  private _choose(chosen: HTMLButtonElement | undefined, focus: boolean): void {
    const before = this._chosen;
    if (before) {
      setAttribute(before, 'aria-pressed', 'false');
      if (focus) {
        this._moveTo(before);
      }
    }
    this._chosen = chosen;
    this._details.hidden = !chosen;
    if (chosen) {
      setAttribute(chosen, 'aria-pressed', 'true');
      this._moveTo(chosen);
    }
  }

  private _all(): HTMLButtonElement[] {
    return this._buttons.flatMap(row => row.filter(each => each !== undefined));
  }

  /** Make a cell the only one that the tab key reaches, with the focus. */
  private _moveTo(target: HTMLButtonElement): void {
    this._all().forEach(each => (each.tabIndex = each === target ? 0 : -1));
    target.focus();
  }

  private _keyed(event: KeyboardEvent): void {
    if (event.key === 'Escape' && this._chosen) {
      event.preventDefault();
      event.stopPropagation();
      this._choose(undefined, true);
      return;
    }
    const row = this._buttons.findIndex(cells => cells.includes(event.target as HTMLButtonElement));
    const column = this._buttons[row]?.indexOf(event.target as HTMLButtonElement) ?? -1;
    const target = row < 0 ? undefined : this._target(event.key, row, column);
    if (target) {
      event.preventDefault();
      event.stopPropagation();
      this._moveTo(target);
    }
  }

  /** The next cell in the direction of a key; modules that a step does not have are skipped. */
  private _target(key: string, row: number, column: number): HTMLButtonElement | undefined {
    const across = this._buttons[row] ?? [];
    const down = this._buttons.map(cells => cells[column]);
    switch (key) {
      case 'ArrowRight':
        return across.slice(column + 1).find(Boolean);
      case 'ArrowLeft':
        return across.slice(0, column).filter(Boolean).at(-1);
      case 'ArrowDown':
        return down.slice(row + 1).find(Boolean);
      case 'ArrowUp':
        return down.slice(0, row).filter(Boolean).at(-1);
      case 'Home':
        return across.find(Boolean);
      case 'End':
        return across.filter(Boolean).at(-1);
      default:
        return undefined;
    }
  }
}

function tensorTable(tensors: readonly ComparedTensor[]): HTMLElement {
  const names = [t('phase'), t('tensor'), t('ranks'), t('line'), t('× tolerance'), t('suggests')];
  const body = element('tbody');
  for (const each of tensors) {
    const micro = tensors.some(other => other.micro !== each.micro) ? t(' of micro-batch %1', each.micro) : '';
    const guess = each.consequence ? t('a consequence') : each.suggests;
    const texts = [each.phase, each.title + micro, each.ranks, each.line, short(each.ratio ?? Infinity), guess];
    const row = element('tr', '', {}, ...texts.map(text => element('td', '', {}, text)));
    setAttribute(row, 'data-wrong', (each.ratio ?? Infinity) > 1);
    body.append(row);
  }
  const head = element('tr', '', {}, ...names.map(name => element('th', '', { scope: 'col' }, name)));
  return element('table', 'mk-Comparison-table', {}, element('thead', '', {}, head), body);
}

/** A ratio in a cell: `0`, `0.31`, `4.2`, `120`, `3e+5`, `∞`. */
function short(ratio: number): string {
  if (!Number.isFinite(ratio)) {
    return '∞';
  }
  return ratio >= 1e4 ? ratio.toExponential(0) : figure(Number(ratio.toPrecision(2)));
}

function much(ratio: number | null): string {
  if (ratio === null) {
    return t('rounding explains no difference');
  }
  return ratio ? t('%1 × tolerance', short(ratio)) : t('the same bytes');
}
