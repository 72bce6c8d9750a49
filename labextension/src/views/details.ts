import type { Actions, Deed, MeshStore, RankView, RequestError, StackGroup, Variable } from '../model';
import {
  doingOf,
  duration,
  memory,
  nameRanks,
  reasonOf,
  runsSomething,
  stateName,
  t,
  textSize,
  wholeDuration
} from '../model';
import { button, Disposables, element, moveByArrows, setAttribute, setCutText, setText } from './dom';
import { stateIcon } from './glyphs';
import { LogView } from './log';
import { doingsOf, Reading } from './reading';

const TABS = ['overview', 'stack', 'log', 'variables'] as const;
type Tab = (typeof TABS)[number];

/** Deeds that a rank has a button for. */
const DEEDS = ['debug', 'interrupt', 'kill', 'heal'] as const;

function tabName(tab: Tab): string {
  switch (tab) {
    case 'overview':
      return t('Overview');
    case 'stack':
      return t('Stack');
    case 'log':
      return t('Log');
    case 'variables':
      return t('Variables');
  }
}

function deedName(deed: (typeof DEEDS)[number]): string {
  switch (deed) {
    case 'debug':
      return t('Debug');
    case 'interrupt':
      return t('Interrupt');
    case 'kill':
      return t('Kill');
    case 'heal':
      return t('Heal');
  }
}

/** Why a deed makes no sense for a rank in its state; empty if it does. */
function refusalOf(deed: Deed, rank: RankView): string {
  const { state } = rank;
  const over = state === 'dead' || state === 'ended';
  if (deed === 'heal') {
    return over ? '' : t('This rank is alive.');
  }
  if (over) {
    return t('This rank is not alive.');
  }
  return deed === 'interrupt' && !runsSomething(rank) ? t('This rank runs nothing.') : '';
}

/** All of one rank, and what can be done with it. */
export class RankDetails {
  readonly node = element('section', 'mk-Details', { hidden: true });
  private readonly _head = element('div', 'mk-Details-head');
  private readonly _icon = element('span', 'mk-Details-icon');
  private readonly _title = element('span', 'mk-Details-title');
  private readonly _cause = element('div', 'mk-Details-cause');
  private readonly _deeds = element('div', 'mk-Details-deeds', { role: 'group' });
  private readonly _result = element('div', 'mk-Details-result', { role: 'status' });
  private readonly _tabs = element('div', 'mk-Tabs', { role: 'tablist' });
  private readonly _page = element('div', 'mk-Details-page', { role: 'tabpanel', tabindex: 0 });
  private readonly _buttons = new Map<Deed, HTMLButtonElement>();
  private readonly _tabButtons = new Map<Tab, HTMLButtonElement>();
  private readonly _disposables = new Disposables();
  private _mesh = '';
  private _rank = -1;
  /** Whether it was said that the rank will stop; "Debug" cancels that. */
  private _promised = false;
  private _tab: Tab = 'overview';
  private _facts: Overview | undefined;
  private _log: LogView | undefined;
  private _reading: Reading | undefined;

  /**
   * @param _closed - called when the person closes it.
   */
  constructor(
    host: HTMLElement,
    private readonly _store: MeshStore,
    private readonly _actions: Actions,
    private readonly _closed: () => void
  ) {
    const close = button('mk-Button mk-Details-close', '×', () => this.close(), { 'aria-label': t('Close') });
    this._head.append(this._icon, this._title, close);
    for (const tab of TABS) {
      const made = button('mk-Tab', tabName(tab), () => this._open(tab), { role: 'tab', tabindex: -1 });
      this._tabButtons.set(tab, made);
      this._tabs.append(made);
    }
    moveByArrows(this._tabs, () => [...this._tabButtons.values()], this._disposables);
    this.node.append(this._head, this._cause, this._deeds, this._result, this._tabs, this._page);
    host.append(this.node);
  }

  /** The rank that is shown; -1: none. */
  get rank(): number {
    return this._rank;
  }

  show(mesh: string, rank: number): void {
    if (mesh !== this._mesh || rank !== this._rank) {
      this._mesh = mesh;
      this._rank = rank;
      this._say('', '');
      this._offer();
      this.node.hidden = false;
      this.node.setAttribute('aria-label', t('Rank %1', rank));
      this._open(this._tab);
    }
    this.update();
  }

  close(): void {
    if (this._rank >= 0) {
      this._rank = -1;
      this._clear();
      this.node.hidden = true;
      this._closed();
    }
  }

  /** Show what the store has now. */
  update(): void {
    const rank = this._store.rank(this._mesh, this._rank);
    if (!rank) {
      return;
    }
    const look = `${rank.state} ${rank.older}`;
    if (this._icon.dataset['look'] !== look) {
      this._icon.dataset['look'] = look;
      this._icon.replaceChildren(stateIcon(rank.state, rank.older));
    }
    if (this._promised && rank.state === 'stopped') {
      this._say('', ''); // that it will stop
    }
    setText(this._title, t('Rank %1 · %2', rank.rank, stateName(rank.state)));
    setCutText(this._cause, reasonOf(rank));
    setAttribute(this.node, 'data-state', rank.state);
    for (const [deed, made] of this._buttons) {
      const refusal = refusalOf(deed, rank);
      setAttribute(made, 'disabled', !!refusal);
      setAttribute(made, 'title', refusal || undefined);
    }
    this._facts?.update(rank);
    this._reading?.update();
  }

  dispose(): void {
    this._clear();
    this._disposables.dispose();
    this.node.remove();
  }

  private _clear(): void {
    this._facts = undefined;
    this._log?.dispose();
    this._log = undefined;
    this._reading?.dispose();
    this._reading = undefined;
    this._page.replaceChildren();
  }

  private _open(tab: Tab): void {
    this._tab = tab;
    this._clear();
    for (const [name, made] of this._tabButtons) {
      setAttribute(made, 'aria-selected', String(name === tab));
      made.tabIndex = name === tab ? 0 : -1;
    }
    this._page.dataset['tab'] = tab;
    switch (tab) {
      case 'overview':
        this._facts = new Overview(this._page, this._store);
        this.update();
        break;
      case 'log':
        this._log = new LogView(this._page, this._actions, { mesh: this._mesh, ranks: [this._rank] });
        break;
      case 'stack':
        this._read(async (mesh, rank) => stackView((await this._actions.ask('stack', mesh, [rank])).stacks));
        break;
      case 'variables':
        this._read(async (mesh, rank) => {
          const { frame, variables } = await this._actions.ask('variables', mesh, [rank], { frame: 0 });
          const place = frame ? t('%1, %2, line %3', frame.function, frame.file, frame.line) : '';
          return [...(place ? [element('div', 'mk-Place', {}, place)] : []), variableTable(variables)];
        });
        break;
    }
  }

  /** Show what the kernel answers about the rank, anew when the rank does something else or is a new process. */
  private _read(ask: (mesh: string, rank: number) => Promise<Node[]>): void {
    const [mesh, rank] = [this._mesh, this._rank];
    this._reading = new Reading(this._page, this._store, {
      again: t('Ask again'),
      asking: t('Asking rank %1 …', rank),
      ask: () => ask(mesh, rank),
      about: () => doingsOf(this._store, mesh, [rank]),
      refusal: error => refusalView(error as RequestError)
    });
  }

  /** The buttons of deeds. */
  private _offer(): void {
    this._buttons.clear();
    this._deeds.setAttribute('aria-label', t('Do with rank %1', this._rank));
    for (const deed of DEEDS) {
      const pressed = () => this._pressed(deed);
      this._buttons.set(deed, button('mk-Button', deedName(deed), pressed, { 'data-deed': deed }));
    }
    this._deeds.replaceChildren(...this._buttons.values());
    this.update();
  }

  private _pressed(deed: (typeof DEEDS)[number]): void {
    if (deed === 'kill') {
      this._confirm();
    } else {
      this._perform(deed === 'debug' && this._promised ? 'undebug' : deed);
    }
  }

  /** Note whether the rank will stop, which the button "Debug" then cancels. */
  private _promise(promised: boolean): void {
    this._promised = promised;
    const debug = this._buttons.get('debug');
    if (debug) {
      setText(debug, promised ? t('Do not stop') : deedName('debug'));
    }
  }

  /** Ask once more, at the button that was pressed: the pointer is then on the one that keeps the rank. */
  private _confirm(): void {
    const keep = button('mk-Button', t('Keep'), () => {
      this._offer();
      this._buttons.get('kill')?.focus();
    });
    const kill = button(
      'mk-Button',
      t('Kill'),
      () => {
        this._offer();
        this._perform('kill');
      },
      { 'data-deed': 'kill', 'data-sure': true }
    );
    const question = element('span', 'mk-Details-question', {}, t('Kill rank %1?', this._rank));
    this._buttons.get('kill')?.replaceWith(keep, kill, question);
    this._buttons.delete('kill');
    keep.focus();
  }

  private _perform(deed: Deed): void {
    const rank = this._rank;
    const say = (text: string, hint: string, failed: boolean) => {
      if (rank === this._rank) {
        this._say(text, hint, failed);
      }
    };
    this._say(t('%1: asked …', deed === 'undebug' ? t('Do not stop') : deedName(deed as (typeof DEEDS)[number])), '');
    this._actions.perform(deed, this._mesh, [rank]).then(
      done => {
        say(done?.text || t('Done.'), '', false);
        if (rank === this._rank) {
          this._promise(deed === 'debug' && this._store.rank(this._mesh, rank)?.state !== 'stopped');
        }
      },
      (error: RequestError) => say(error.message, error.hint, true)
    );
  }

  private _say(text: string, hint: string, failed = false): void {
    this._promise(false);
    setCutText(this._result, [text, hint].filter(Boolean).join(' '));
    setAttribute(this._result, 'data-failed', failed);
  }
}

/** The facts of a rank, and its actors. */
class Overview {
  private readonly _values = new Map<string, HTMLElement>();
  private readonly _list = element('dl', 'mk-Facts');
  private readonly _actors = element('table', 'mk-Table');
  private readonly _rows = element('tbody');

  constructor(
    host: HTMLElement,
    private readonly _store: MeshStore
  ) {
    const head = element('tr');
    for (const [name, numeric] of [
      [t('Actor'), false],
      [t('Runs'), false],
      [t('Waiting'), true],
      [t('Calls'), true],
      [t('Failed'), true]
    ] as const) {
      head.append(element('th', numeric ? 'mk-mod-number' : '', { scope: 'col' }, name));
    }
    this._actors.append(element('thead', '', {}, head), this._rows);
    host.append(this._list, this._actors);
  }

  update(rank: RankView): void {
    const now = this._store.now();
    const gpus = Object.entries(rank.gpu_memory).map(([index, size]) => t('GPU %1: %2', index, memory(size)));
    this._fact(t('Runs'), doingOf(rank, now) || t('nothing'));
    this._fact(t('Waiting'), String(rank.waiting));
    this._fact(t('Memory'), [rank.rss ? memory(rank.rss) : '–', ...gpus].join(' · '));
    this._fact(t('Processor'), t('%1 %', Math.round(rank.cpu)));
    this._fact(t('Host'), this._store.hostName(rank.host) || '–');
    this._fact(t('Process'), rank.pid ? String(rank.pid) : '–');
    this._fact(t('Up'), rank.started ? wholeDuration(now - rank.started) : '–');
    this._fact(t('Calls'), rank.failures ? t('%1, %2 failed', rank.calls, rank.failures) : String(rank.calls));
    this._fact(t('Sent'), textSize(rank.sent));
    this._fact(t('Received'), textSize(rank.received));
    this._fact(t('Tree'), rank.older ? t('has modules older than its host') : t('as its host'));
    this._actors.hidden = rank.actors.length === 0;
    while (this._rows.rows.length > rank.actors.length) {
      this._rows.deleteRow(-1);
    }
    rank.actors.forEach((actor, index) => {
      const row = this._rows.rows[index] ?? this._addRow();
      const runs = actor.endpoint
        ? `${actor.endpoint}${actor.since ? ` · ${duration(Math.max(0, now - actor.since))}` : ''}`
        : '–';
      [actor.name, runs, actor.waiting, actor.calls, actor.failures].forEach((value, column) => {
        const cell = row.cells[column];
        if (cell) {
          setCutText(cell, String(value));
        }
      });
      setAttribute(row, 'title', actor.cls || undefined);
    });
  }

  private _addRow(): HTMLTableRowElement {
    const row = this._rows.insertRow();
    for (let column = 0; column < 5; column++) {
      row.insertCell().className = column > 1 ? 'mk-mod-number' : '';
    }
    return row;
  }

  private _fact(name: string, text: string): void {
    let value = this._values.get(name);
    if (!value) {
      value = element('dd');
      this._values.set(name, value);
      this._list.append(element('dt', '', {}, name), value);
    }
    setCutText(value, text);
  }
}

/** Stacks, the frame that runs first, as people look for it there. */
export function stackView(stacks: readonly StackGroup[]): Node[] {
  if (!stacks.length) {
    return [element('div', 'mk-Note', {}, t('No Python stack.'))];
  }
  return stacks.map(({ ranks, frames, note }) => {
    const list = element('ol', 'mk-Stack');
    [...frames].reverse().forEach(frame => {
      const line = element('li');
      line.append(
        element('span', 'mk-Stack-function', {}, frame.function),
        element('span', 'mk-Stack-place', {}, t('%1:%2', frame.file, frame.line))
      );
      if (frame.text) {
        line.append(element('code', 'mk-Stack-text', {}, frame.text.trim()));
      }
      list.append(line);
    });
    const head = [ranks.length > 1 ? nameRanks(ranks) : '', note ?? ''].filter(Boolean).join(' · ');
    const shown = frames.length ? list : element('div', 'mk-Note', {}, t('No user code runs.'));
    return element('div', '', {}, ...(head ? [element('div', 'mk-Place', {}, head)] : []), shown);
  });
}

function variableTable(variables: readonly Variable[]): Node {
  if (!variables.length) {
    return element('div', 'mk-Note', {}, t('No variables.'));
  }
  const rows = variables.map(({ name, type, text }) => {
    const row = element('tr');
    row.append(
      element('th', 'mk-Code', { scope: 'row', title: name }, name),
      element('td', 'mk-Faint', { title: type }, type),
      element('td', 'mk-Code', { title: text }, text)
    );
    return row;
  });
  return element('table', 'mk-Table mk-Variables', {}, element('tbody', '', {}, ...rows));
}

/** Why the kernel did not answer, and what to do next. */
export function refusalView(error: Error & { hint?: string }): HTMLElement {
  const box = element('div', 'mk-Refusal', { role: 'alert' }, element('div', '', {}, error.message));
  if (error.hint) {
    box.append(element('div', 'mk-Faint', {}, error.hint));
  }
  return box;
}
