import type { HostGroup, MeshStore, RankView, StoreChange } from '../../model';
import { byHost, countStates, describeRank, STATES, stateName, t } from '../../model';
import { button, element, setText } from '../dom';
import type { Theme } from '../theme';
import { type Place, rankTooltip, type Tooltip } from '../tooltip';
import { ScrolledCanvas } from './canvas';
import { RankCards } from './cards';
import type { Box, GridMode, Layout } from './layout';
import { layoutCells, layoutHosts, modeFor } from './layout';
import { Painter } from './painter';

/** The ranks of a mesh over its hosts: cards, cells, or a bar for each host, which opens. */
export class MeshGrid {
  readonly node = element('div', 'mk-Grid');
  private readonly _body = element('div', 'mk-Grid-body');
  private readonly _back: HTMLButtonElement;
  private readonly _place = element('span', 'mk-Grid-place');
  private readonly _only: ReadonlySet<number> | null;
  private _groups: readonly HostGroup[] = [];
  private _ranks: readonly RankView[] = [];
  /** The ranks that cells show, by the index of the cell, and the other way. */
  private _shownRanks: number[] = [];
  private _cellOf = new Map<number, number>();
  private _groupOf = new Map<number, number>();
  private _mode: GridMode = 'cards';
  private _chosen: GridMode | undefined;
  private _zoomed = '';
  private _selected = -1;
  private _cards: RankCards | undefined;
  private _canvas: ScrolledCanvas | undefined;
  private _painter: Painter | undefined;

  /**
   * @param _mesh - the key of the mesh.
   * @param _pick - called with the rank that was clicked.
   * @param only - the ranks to show; none named: all.
   */
  constructor(
    host: HTMLElement,
    private readonly _store: MeshStore,
    private readonly _mesh: string,
    private readonly _theme: Theme,
    private readonly _tooltip: Tooltip,
    private readonly _pick: (rank: number) => void,
    only: readonly number[] = []
  ) {
    this._only = only.length ? new Set(only) : null;
    this._back = button('mk-Button mk-Grid-back', t('All hosts'), () => this._zoom(''));
    this.node.append(element('div', 'mk-Grid-path', {}, this._back, this._place), this._body);
    this.node.addEventListener('keydown', event => {
      if (event.key === 'Escape' && this._zoomed) {
        event.stopPropagation();
        this._zoom('');
      }
    });
    host.append(this.node);
    this.update();
  }

  /** How ranks are shown now; the ranks of one host that was opened are a part of its hosts. */
  get mode(): GridMode {
    return this._zoomed ? 'hosts' : this._mode;
  }

  /** Whether there are both hosts and cells to choose from. */
  get hasModes(): boolean {
    return this._groups.length > 1 && modeFor(this._count, this._groups.length) !== 'cards';
  }

  /** Show a bar for each host, or a cell for each rank. */
  setMode(mode: 'hosts' | 'cells'): void {
    this._chosen = mode;
    this._zoomed = '';
    this._build();
  }

  /** Show what the store has now; with a change, only what that concerns. */
  update(change?: StoreChange): void {
    if (!this._store.meshes.has(this._mesh)) {
      return; // it has ended: its last state stays
    }
    this._ranks = this._store.ranks(this._mesh);
    if (!change || change.structure) {
      const groups = byHost(this._ranks.filter(rank => !this._only || this._only.has(rank.rank)));
      const same = this._canvas || this._cards ? sameGroups(groups, this._groups) : false;
      this._groups = groups;
      if (!same) {
        this._build();
        return;
      }
    }
    this._cards?.update(this._ranks);
    const changed = change && !change.structure ? change.ranks.get(this._mesh) : undefined;
    if (!this._canvas || (change && !change.structure && !changed)) {
      return;
    }
    this._canvas.redraw(changed && this._itemsOf(changed));
    this._canvas.repoint();
  }

  /** Durations have grown. */
  tick(): void {
    this._cards?.update(this._ranks);
    this._canvas?.repoint();
  }

  /** The colours are others. */
  repaint(): void {
    this._painter = undefined;
    this._canvas?.redraw();
  }

  /** Put the focus on a rank, or where it is shown. */
  focus(rank: number): void {
    this._cards?.focus(rank);
    this._canvas?.focus();
  }

  /** Mark a rank as the one whose details are shown (-1: none), and bring it into view. */
  select(rank: number): void {
    this._selected = rank;
    this._cards?.select(rank);
    if (this._canvas && rank >= 0 && this._mode === 'cells' && !this._cellOf.has(rank)) {
      this._zoom(this._ranks[rank]?.host ?? ''); // it is on another host than is shown
      return;
    }
    this._markSelected();
  }

  /** Draw at the size that the view has now. */
  resize(): void {
    this._canvas?.relayout();
  }

  dispose(): void {
    this._clear();
    this.node.remove();
  }

  private get _count(): number {
    return this._groups.reduce((count, group) => count + group.ranks.length, 0);
  }

  private _zoom(host: string): void {
    const from = this._zoomed;
    this._zoomed = host;
    this._build();
    if (this._canvas) {
      const index = this._groups.findIndex(group => group.host === from);
      this._canvas.focus();
      if (!host && index >= 0 && this._mode === 'hosts') {
        this._canvas.select(index);
      }
    }
  }

  private _clear(): void {
    this._cards?.dispose();
    this._canvas?.dispose();
    this._cards = undefined;
    this._canvas = undefined;
    this._tooltip.hide();
  }

  private _build(): void {
    this._clear();
    const groups = this._groups;
    if (this._zoomed && !groups.some(group => group.host === this._zoomed)) {
      this._zoomed = '';
    }
    const natural = modeFor(this._count, groups.length);
    this._mode = this._zoomed ? 'cells' : natural === 'cards' ? natural : (this._chosen ?? natural);
    this.node.dataset['mode'] = this._mode;
    this.node.dataset['zoomed'] = String(!!this._zoomed);
    setText(this._place, this._zoomed ? this._store.hostName(this._zoomed) : '');
    const name = this._store.meshes.get(this._mesh)?.name ?? '';
    if (this._mode === 'cards') {
      this._cards = new RankCards(this._body, t('Ranks of %1', name), this._store, groups, this._ranks, rank =>
        this._pick(rank)
      );
      this._cards.select(this._selected);
      return;
    }
    const shown = this._zoomed ? groups.filter(group => group.host === this._zoomed) : groups;
    this._shownRanks = shown.flatMap(group => group.ranks);
    this._cellOf = new Map(this._shownRanks.map((rank, index) => [rank, index]));
    this._groupOf = new Map(groups.flatMap((group, index) => group.ranks.map(rank => [rank, index] as const)));
    const label = this._mode === 'hosts' ? t('Hosts of %1', name) : t('Ranks of %1', name);
    this._painter = undefined;
    this._canvas = new ScrolledCanvas(this._body, label, {
      layout: width => this._layout(shown, width),
      paint: (context, ratio, index, box) => this._paint(context, ratio, index, box),
      paintLabel: (context, ratio, group, box) => {
        this._paintWith(context, ratio).label(this._store.hostName(shown[group]?.host ?? ''), box);
      },
      describe: index => this._describe(index),
      pick: index => this._picked(index),
      point: (index, box) => this._point(index, box)
    });
    this._markSelected();
  }

  private _layout(shown: readonly HostGroup[], width: number): Layout {
    return this._mode === 'hosts' ? layoutHosts(shown.length, width) : layoutCells(shown, width, !this._zoomed);
  }

  private _markSelected(): void {
    if (this._canvas) {
      const items = this._mode === 'hosts' ? this._groupOf : this._cellOf;
      this._canvas.select(items.get(this._selected) ?? -1);
    }
  }

  private _itemsOf(ranks: ReadonlySet<number>): number[] {
    const items = this._mode === 'hosts' ? this._groupOf : this._cellOf;
    return [...ranks].flatMap(rank => items.get(rank) ?? []);
  }

  private _paintWith(context: CanvasRenderingContext2D, ratio: number): Painter {
    if (!this._painter?.fits(ratio)) {
      this._painter = new Painter(context, this._theme.palette, ratio);
    }
    return this._painter;
  }

  private _paint(context: CanvasRenderingContext2D, ratio: number, index: number, box: Box): void {
    const painter = this._paintWith(context, ratio);
    if (this._mode === 'hosts') {
      const group = this._groups[index];
      if (group) {
        painter.host(this._store.hostName(group.host), this._countsOf(group), box);
      }
      return;
    }
    const rank = this._rankAt(index);
    if (rank) {
      painter.rank(rank, box);
    }
  }

  private _rankAt(index: number): RankView | undefined {
    return this._ranks[this._shownRanks[index] ?? -1];
  }

  private _countsOf(group: HostGroup) {
    return countStates(group.ranks.flatMap(rank => this._ranks[rank] ?? []));
  }

  private _describe(index: number): string {
    const group = this._groups[index];
    if (this._mode !== 'hosts') {
      const rank = this._rankAt(index);
      return rank ? describeRank(rank, this._store.hostName(rank.host), this._store.now()) : '';
    }
    return group ? `${this._store.hostName(group.host)}: ${this._states(group)}` : '';
  }

  private _states(group: HostGroup): string {
    const { states } = this._countsOf(group);
    return STATES.filter(state => states[state])
      .map(state => `${states[state]} ${stateName(state)}`)
      .join(', ');
  }

  private _picked(index: number): void {
    const group = this._groups[index];
    if (this._mode === 'hosts') {
      this._zoom(group?.host ?? '');
      return;
    }
    const rank = this._shownRanks[index];
    if (rank !== undefined) {
      this._pick(rank);
    }
  }

  private _point(index: number, place: Place | null): void {
    if (!place) {
      this._tooltip.hide();
      return;
    }
    const group = this._groups[index];
    const rank = this._rankAt(index);
    if (this._mode === 'hosts' && group) {
      const content = element('div', '', {}, element('div', 'mk-Tooltip-title', {}, this._store.hostName(group.host)));
      content.append(element('div', 'mk-Tooltip-facts', {}, this._states(group)));
      this._tooltip.show(content, place);
    } else if (this._mode !== 'hosts' && rank) {
      this._tooltip.show(rankTooltip(rank, this._store.hostName(rank.host), this._store.now()), place);
    }
  }
}

function sameGroups(some: readonly HostGroup[], others: readonly HostGroup[]): boolean {
  return (
    some.length === others.length &&
    some.every((group, index) => {
      const other = others[index];
      return (
        other?.host === group.host &&
        other.ranks.length === group.ranks.length &&
        group.ranks.every((rank, at) => rank === other.ranks[at])
      );
    })
  );
}
