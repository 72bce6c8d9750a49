import type { Actions, FeedClient } from '../model';
import { countStates, t } from '../model';
import { MeshBoard } from '../views/board';
import { button, element, FrameTask, setAttribute } from '../views/dom';
import { HostsTable } from '../views/hosts';
import { LogView } from '../views/log';
import type { MeshDeed } from './actionbar';
import { ActionBar } from './actionbar';
import { ActorSection } from './actorsection';
import { hangSection, stacksSection } from './asksections';
import { DebugSection, groupStops } from './debugsection';
import { JobList } from './joblist';
import { JobSection } from './jobsection';
import { MeshList, sortMeshes } from './meshlist';
import { Section } from './section';
import type { Surroundings } from './surroundings';
import { UpForm } from './upform';

/** All meshes of one kernel: which there are, the chosen one, and what can be done with it. */
export class KernelPane {
  readonly node = element('div', 'mk-Pane');
  private readonly _list: MeshList;
  private readonly _bar: ActionBar;
  private readonly _empty = element('div', 'mk-Pane-empty');
  private readonly _mesh = element('div', 'mk-Pane-mesh');
  private readonly _view = element('div', 'mk-Pane-view');
  private readonly _waiting: JobList;
  private readonly _jobs: Section;
  private readonly _sections: Record<'debug' | 'log' | 'stacks' | 'actors' | 'hang' | 'hosts', Section>;
  private readonly _more: HTMLButtonElement;
  private readonly _formHost = element('div', 'mk-Pane-form', { hidden: true });
  private readonly _actions: Actions;
  private readonly _frame = new FrameTask(() => this._draw());
  private readonly _unsubscribe: () => void;
  private _form: UpForm | undefined;
  private _board: MeshBoard | undefined;
  private _debug: DebugSection | undefined;
  private _chosen = '';
  private _visible = false;

  /**
   * @param _kernel - identifies the kernel, of which it is remembered which mesh the person chose.
   */
  constructor(
    host: HTMLElement,
    private readonly _client: FeedClient,
    private readonly _surroundings: Surroundings,
    private readonly _kernel: string
  ) {
    const { store } = _client;
    this._actions = withInsertion(_client, _surroundings);
    const now = () => store.now();
    this._waiting = new JobList(this.node, t('Hosts that are waited for'), this._actions, _surroundings, now);
    this._list = new MeshList(this.node, store, mesh => this._choose(mesh));
    this.node.append(this._empty, this._mesh, this._formHost);
    this._bar = new ActionBar(this._mesh, store, this._actions, _surroundings);
    this._mesh.append(this._view);
    const { memory } = _surroundings;
    const section = (id: string, title: string, make: ConstructorParameters<typeof Section>[4]) =>
      new Section(this._mesh, id, title, memory, make);
    this._sections = {
      debug: section('debug', t('Debugger'), body => {
        const made = new DebugSection(body, store, this._actions, _surroundings, this._chosen);
        this._debug = made;
        return made;
      }),
      log: section('log', t('Log'), body => new LogView(body, this._actions, { mesh: this._chosen })),
      stacks: section('stacks', t('Stacks'), body => stacksSection(body, store, this._actions, this._chosen)),
      hang: section('hang', t('Hang'), body => hangSection(body, store, this._actions, this._chosen)),
      actors: section('actors', t('Actors'), body => new ActorSection(body, store, this._chosen)),
      hosts: section('hosts', t('Hosts'), body => new HostsTable(body, store))
    };
    this._more = button('mk-Button mk-Pane-more', t('Bring up a mesh …'), () => this.openForm(), {
      'aria-expanded': 'false'
    });
    this.node.append(this._more);
    const jobs = (body: HTMLElement) => new JobSection(body, this._actions, _surroundings, now);
    this._jobs = new Section(this.node, 'jobs', t('Jobs'), memory, jobs);
    this._unsubscribe = store.subscribe(() => this._frame.request());
    host.append(this.node);
    this._draw();
  }

  /** Whether a person can see it; nothing is drawn otherwise. */
  setVisible(visible: boolean): void {
    this._visible = visible;
    this.node.hidden = !visible;
    if (visible) {
      this._board?.refresh();
      this._frame.request();
    }
  }

  /** Show that what is here is old: the kernel does not tell what happens. */
  setStale(stale: boolean): void {
    setAttribute(this.node, 'data-stale', stale);
  }

  /** Do something with the chosen mesh, as its button does. */
  perform(deed: MeshDeed): void {
    void this._bar.perform(deed);
  }

  /** Show the next stopped rank in the debugger. */
  nextStop(): void {
    this._sections.debug.open(true);
    this._debug?.next();
  }

  /** The key of the mesh that is shown; empty: none. */
  get mesh(): string {
    return this._chosen;
  }

  /** Open the log. */
  openLog(): void {
    this._sections.log.open(true);
    this._sections.log.node.scrollIntoView({ block: 'nearest' });
  }

  /** Open the form that brings a mesh up; or close it, if it is open. */
  openForm(open = this._formHost.hidden): void {
    this._formHost.hidden = !open;
    setAttribute(this._more, 'aria-expanded', String(open));
    this._form?.dispose();
    this._form = undefined;
    if (open) {
      this._form = new UpForm(this._formHost, this._actions, this._surroundings, '', () => this._meshNames());
      this._form.focus();
    }
  }

  private _meshNames(): string[] {
    return [...this._client.store.meshes.values()].map(({ name }) => name);
  }

  dispose(): void {
    this._frame.cancel();
    this._unsubscribe();
    this._form?.dispose();
    Object.values(this._sections).forEach(section => section.dispose());
    this._board?.dispose();
    this._bar.dispose();
    this._jobs.dispose();
    this._waiting.dispose();
    this._list.dispose();
    this.node.remove();
  }

  private _choose(mesh: string): void {
    this._surroundings.memory.set(`mesh.${this._kernel}`, this._client.store.meshes.get(mesh)?.name ?? '');
    this._show(mesh);
    this._draw();
  }

  private _show(mesh: string): void {
    if (mesh === this._chosen) {
      return;
    }
    this._chosen = mesh;
    this._board?.dispose();
    this._board = mesh
      ? new MeshBoard(this._view, this._client.store, this._actions, { mesh, connection: this._client })
      : undefined;
    Object.values(this._sections).forEach(section => section.renew());
  }

  private _draw(): void {
    const { store } = this._client;
    // That which the person chose; else the current one, also when that is another one now.
    const meshes = sortMeshes(store.meshes.values());
    const name = this._surroundings.memory.get(`mesh.${this._kernel}`);
    const chosen = meshes.find(mesh => mesh.name === name) ?? meshes.find(mesh => mesh.current) ?? meshes.at(-1);
    this._show(chosen?.key ?? '');
    if (!this._visible) {
      return;
    }
    const known = store.version >= 0;
    const empty = known && !store.meshes.size;
    this._mesh.hidden = !this._chosen;
    this._empty.hidden = !empty;
    this._more.hidden = !known || empty;
    if (empty && !this._empty.hasChildNodes()) {
      this._empty.append(element('p', 'mk-Note', {}, t('This kernel has no mesh yet.')));
      new UpForm(this._empty, this._actions, this._surroundings, '', () => this._meshNames());
    } else if (!empty && this._empty.hasChildNodes()) {
      this._empty.replaceChildren();
      this.openForm(false);
    }
    this._waiting.update(store.jobs.values());
    this._jobs.node.hidden = !known;
    this._jobs.count(String(store.jobs.size || ''));
    this._list.update(this._chosen);
    if (this._chosen) {
      this._bar.update(this._chosen);
      this._count();
      Object.values(this._sections).forEach(section => section.update());
    }
  }

  private _count(): void {
    const { store } = this._client;
    const ranks = store.ranks(this._chosen);
    const { states } = countStates(ranks);
    const { debug, hang, actors, hosts } = this._sections;
    debug.count(states.stopped ? String(groupStops(ranks).reduce((sum, group) => sum + group.ranks.length, 0)) : '');
    hang.count(store.meshes.get(this._chosen)?.hang ? t('hangs') : '', true);
    actors.count(String(new Set(ranks.flatMap(rank => rank.actors.map(actor => actor.name))).size || ''));
    hosts.count(
      String(store.hosts.size || ''),
      [...store.hosts.values()].some(host => host.gone)
    );
  }
}

/** The actions of a kernel, for views that also insert code. */
function withInsertion(client: FeedClient, surroundings: Surroundings): Actions {
  return {
    ask: (what, mesh, ranks, options) => client.ask(what, mesh, ranks, options),
    perform: (what, mesh, ranks, options) => client.perform(what, mesh, ranks, options),
    follow: (...request) => client.follow(...request),
    plot: (...request) => client.plot(...request),
    insertCode: code => void surroundings.insertCode(code)
  };
}
