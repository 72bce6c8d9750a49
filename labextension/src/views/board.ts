import type { Actions, Connection, Dispose, FailureView, MeshStore, RankState, RankView, StoreChange } from '../model';
import { clock, t } from '../model';
import { RankDetails } from './details';
import { button, Disposables, element, FrameTask, moveByArrows, observeSize, setAttribute, setText } from './dom';
import { stateIcon } from './glyphs';
import { MeshGrid } from './grid/meshgrid';
import { StateLegend } from './legend';
import { MeshNews } from './news';
import { Theme } from './theme';
import { Tooltip } from './tooltip';

/** How often durations grow (ms). */
const TICK = 1_000;

/** Whether the kernel is there; a `FeedClient` has these. */
export interface ConnectionSource {
  readonly connection: Connection;
  onConnection(listener: (connection: Connection) => void): Dispose;
}

export interface BoardOptions {
  /** The key of the one mesh to show; without it, all meshes, one at a time. */
  readonly mesh?: string;
  /** Of that mesh, show these ranks alone; none named: all. */
  readonly ranks?: readonly number[];
  readonly connection?: ConnectionSource;
  /** Called with the mesh and the rank that the person chose; the rank is -1 if none is. */
  readonly selected?: (mesh: string, rank: number) => void;
  /** False: whoever owns this shows the details of a rank elsewhere, by `selected`. */
  readonly details?: boolean;
  /** The text of the state of the mesh when the cell ran that shows it: for a mesh that has ended before this is seen. */
  readonly record?: string;
}

/** A mesh as a person sees it: what is wrong, its ranks over its hosts, and the details of one of them. */
export class MeshBoard {
  readonly node = element('div', 'mk-View mk-Board');
  private readonly _banner = element('div', 'mk-Banner', { role: 'status', hidden: true });
  private readonly _meshes = element('div', 'mk-Meshes mk-Tabs', { role: 'tablist', hidden: true });
  private readonly _empty = element('div', 'mk-Note mk-Board-empty');
  private readonly _content = element('div', 'mk-Board-content', { hidden: true });
  private readonly _bar = element('div', 'mk-Board-bar');
  private readonly _main = element('div', 'mk-Board-main');
  private readonly _modes = element('div', 'mk-Modes', { role: 'group' });
  private readonly _hostsMode: HTMLButtonElement;
  private readonly _cellsMode: HTMLButtonElement;
  private readonly _theme: Theme;
  private readonly _tooltip: Tooltip;
  private readonly _news: MeshNews;
  private readonly _legend: StateLegend;
  private readonly _details: RankDetails | undefined;
  private readonly _disposables = new Disposables();
  private readonly _frame = new FrameTask(() => this._apply());
  private _grid: MeshGrid | undefined;
  private _mesh = '';
  private _selected = -1;
  /** When the mesh was last told of (seconds since 1970, on the controller's clock). */
  private _seen = 0;
  /** What the store told since the last frame; null: everything may differ. */
  private _pending: StoreChange | null | undefined;

  constructor(
    host: HTMLElement,
    private readonly _store: MeshStore,
    actions: Actions,
    private readonly _options: BoardOptions = {}
  ) {
    this.node.append(this._banner, this._meshes, this._empty, this._content);
    host.append(this.node);
    this._tooltip = new Tooltip(this.node);
    this._news = new MeshNews(this._content, this._store, rank => this.select(rank));
    this._legend = new StateLegend(this._bar, state => this._next(state));
    this._modes.setAttribute('aria-label', t('Show'));
    this._hostsMode = button('mk-Button', t('Hosts'), () => this._setMode('hosts'));
    this._cellsMode = button('mk-Button', t('Ranks'), () => this._setMode('cells'));
    this._modes.append(this._hostsMode, this._cellsMode);
    this._bar.append(this._modes);
    this._content.append(this._bar, this._main);
    if (_options.details !== false) {
      this._details = new RankDetails(this._main, this._store, actions, () => this._closeDetails());
    }
    this._disposables.listen(this.node, 'keydown', (event: KeyboardEvent) => {
      if (event.key === 'Escape' && this._selected >= 0) {
        event.stopPropagation();
        this._closeDetails();
      }
    });
    this._theme = new Theme(this.node, () => this._grid?.repaint());
    moveByArrows(this._meshes, () => [...this._meshes.children] as HTMLElement[], this._disposables);
    this._disposables.add(this._store.subscribe(change => this._told(change)));
    this._disposables.add(observeSize(this.node, () => this._fit()));
    const timer = setInterval(() => this._tick(), TICK);
    this._disposables.add(() => clearInterval(timer));
    const { connection } = this._options;
    if (connection) {
      this._disposables.add(connection.onConnection(() => this._connected(connection.connection)));
      this._connected(connection.connection);
    }
    this._fit();
    this._seen = this._store.now();
    this.update();
  }

  /** The key of the mesh that is shown; empty: none. */
  get mesh(): string {
    return this._mesh;
  }

  /** Show a mesh of those that there are. */
  showMesh(mesh: string): void {
    if (mesh !== this._mesh && this._store.meshes.has(mesh)) {
      this.select(-1);
      this._mesh = mesh;
      this._grid?.dispose();
      this._grid = undefined;
      this.update();
    }
  }

  /** Mark a rank, bring it into view, and show its details; -1: none. */
  select(rank: number): void {
    if (rank === this._selected) {
      return;
    }
    if (this._pending !== undefined) {
      this.update();
    }
    this._selected = rank;
    if (rank >= 0) {
      this._details?.show(this._mesh, rank);
    } else {
      this._details?.close();
    }
    setAttribute(this.node, 'data-details', rank >= 0 && !!this._details);
    this._grid?.select(rank);
    this._options.selected?.(this._mesh, rank);
  }

  /** Show all that the store has now, without waiting for a frame. */
  update(): void {
    this._pending = null;
    this._frame.cancel();
    this._apply();
  }

  /** The view has been put into the page, or is shown again: its size and colours may be others. */
  refresh(): void {
    this._theme.refresh();
    this._fit();
    this._grid?.resize();
  }

  dispose(): void {
    this._frame.cancel();
    this._disposables.dispose();
    this._grid?.dispose();
    this._details?.dispose();
    this._legend.dispose();
    this._news.dispose();
    this._theme.dispose();
    this._tooltip.dispose();
    this.node.remove();
  }

  /** Close the details; the focus goes back to the rank, not to nowhere. */
  private _closeDetails(): void {
    const rank = this._selected;
    const focused = this._details?.node.contains(document.activeElement);
    this.select(-1);
    if (focused) {
      this._grid?.focus(rank);
    }
  }

  private _told(change: StoreChange): void {
    if (this._store.meshes.has(this._mesh)) {
      this._seen = this._store.now();
    }
    this._pending = this._pending === undefined ? change : this._pending && joined(this._pending, change);
    this._frame.request();
  }

  private _apply(): void {
    const change = this._pending;
    this._pending = undefined;
    if (change === undefined) {
      return;
    }
    if (!change || change.structure) {
      this._chooseMesh();
      this._showMeshes();
    }
    const mesh = this._store.meshes.get(this._mesh);
    setAttribute(this.node, 'data-ended', !!this._mesh && !mesh);
    this._content.hidden = !this._mesh;
    this._empty.hidden = !!this._mesh;
    this._showEmpty();
    if (!mesh) {
      this._banners();
      return;
    }
    if (!change || change.structure || change.failures || change.ranks.has(this._mesh)) {
      const ranks = this._shownRanks();
      const failures = this._store.failures.filter(failure => failure.mesh === this._mesh && this._concerns(failure));
      this._news.update(mesh, ranks, failures);
      this._legend.update(ranks);
    }
    if (this._grid) {
      this._grid.update(change ?? undefined);
    } else {
      this._grid = new MeshGrid(
        this._main,
        this._store,
        this._mesh,
        this._theme,
        this._tooltip,
        rank => this.select(rank === this._selected ? -1 : rank),
        this._options.ranks
      );
      if (this._details) {
        this._main.append(this._details.node);
      }
    }
    this._showModes();
    this._details?.update();
    this._banners();
  }

  private _shownRanks(): readonly RankView[] {
    const all = this._store.ranks(this._mesh);
    const { ranks } = this._options;
    return ranks?.length ? ranks.flatMap(rank => all[rank] ?? []) : all;
  }

  private _concerns(failure: FailureView): boolean {
    const { ranks } = this._options;
    return !ranks?.length || !failure.ranks.length || failure.ranks.some(rank => ranks.includes(rank));
  }

  /** What is said instead of a mesh; of one that has ended, its record. */
  private _showEmpty(): void {
    const { mesh, record } = this._options;
    const known = this._store.version >= 0;
    if (known && mesh && record) {
      if (!this._empty.querySelector('.mk-Record')) {
        const state = t('This mesh has ended. This is its state when the cell ran.');
        this._empty.replaceChildren(state, element('pre', 'mk-Record', {}, record));
      }
      return;
    }
    const ended = mesh ? t('This mesh has ended.') : t('No mesh yet. %mesh up starts one.');
    setText(this._empty, known ? ended : t('Waiting for the kernel …'));
  }

  private _chooseMesh(): void {
    const { meshes } = this._store;
    const wanted = this._options.mesh;
    if (wanted !== undefined) {
      this._mesh = meshes.has(wanted) ? wanted : this._mesh;
      return;
    }
    if (meshes.has(this._mesh) || (this._mesh && !meshes.size)) {
      return;
    }
    const first = [...meshes.values()].find(mesh => mesh.current) ?? meshes.values().next().value;
    if (first) {
      if (this._mesh) {
        this.select(-1);
      }
      this._mesh = first.key;
      this._grid?.dispose();
      this._grid = undefined;
    }
  }

  private _showMeshes(): void {
    const meshes = this._options.mesh === undefined ? [...this._store.meshes.values()] : [];
    this._meshes.hidden = meshes.length < 2;
    setAttribute(this._meshes, 'aria-label', t('Meshes'));
    const known = new Map(([...this._meshes.children] as HTMLElement[]).map(tab => [tab.dataset['mesh'], tab]));
    this._meshes.replaceChildren(
      ...meshes.map(mesh => {
        const tab =
          known.get(mesh.key) ??
          button('mk-Tab', '', () => this.showMesh(mesh.key), { role: 'tab', 'data-mesh': mesh.key });
        setText(tab, mesh.name);
        setAttribute(tab, 'aria-selected', String(mesh.key === this._mesh));
        tab.tabIndex = mesh.key === this._mesh ? 0 : -1;
        return tab;
      })
    );
  }

  private _showModes(): void {
    const grid = this._grid;
    this._modes.hidden = !grid?.hasModes;
    setAttribute(this._hostsMode, 'aria-pressed', String(grid?.mode === 'hosts'));
    setAttribute(this._cellsMode, 'aria-pressed', String(grid?.mode === 'cells'));
  }

  private _setMode(mode: 'hosts' | 'cells'): void {
    this._grid?.setMode(mode);
    this._grid?.select(this._selected);
    this._showModes();
  }

  /** Show the next rank in a state, after the one that is shown. */
  private _next(state: RankState | 'older'): void {
    const found = this._shownRanks().filter(rank => (state === 'older' ? rank.older : rank.state === state));
    const next = found.find(rank => rank.rank > this._selected) ?? found[0];
    if (next) {
      this.select(next.rank);
    }
  }

  private _tick(): void {
    if (document.visibilityState === 'hidden' || this.node.hasAttribute('data-gone')) {
      return;
    }
    this._grid?.tick();
    this._details?.update();
    this._news.tick();
  }

  private _fit(): void {
    setAttribute(this.node, 'data-wide', this.node.clientWidth >= 640);
  }

  private _connected(connection: Connection): void {
    setAttribute(this.node, 'data-gone', connection === 'gone');
    this._banners();
  }

  private _banners(): void {
    const gone = this.node.hasAttribute('data-gone');
    const ended = this.node.hasAttribute('data-ended');
    this._banner.hidden = !gone && !ended;
    if (gone) {
      const last = t('The kernel has gone. This is the last state, of %1.', clock(this._seen));
      setText(this._banner, this._mesh ? last : t('The kernel has gone.'));
    } else if (ended) {
      setText(this._banner, t('This mesh has ended. This is its last state, of %1.', clock(this._seen)));
    }
    this._banner.replaceChildren(stateIcon('ended'), this._banner.textContent ?? '');
  }
}

function joined(some: StoreChange, more: StoreChange): StoreChange {
  const ranks = new Map([...some.ranks].map(([mesh, numbers]) => [mesh, new Set(numbers)]));
  for (const [mesh, numbers] of more.ranks) {
    const known = ranks.get(mesh) ?? new Set();
    numbers.forEach(number => known.add(number));
    ranks.set(mesh, known);
  }
  return { structure: some.structure || more.structure, failures: some.failures || more.failures, ranks };
}
