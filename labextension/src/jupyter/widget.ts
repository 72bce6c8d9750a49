import { isTrouble, t } from '../model';
import type { MeshDeed } from '../panel/actionbar';
import { KernelPane } from '../panel/kernelpane';
import { KeptSection } from '../panel/keptsection';
import type { Surroundings } from '../panel/surroundings';
import { UpForm } from '../panel/upform';
import { showState, worstMesh } from '../panel/worstmesh';
import { button, element, FrameTask, setAttribute, setText } from '../views/dom';
import { Theme } from '../views/theme';
import type { Message } from '@lumino/messaging';
import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';
import type { Documents } from './documents';
import type { KernelLink } from './link';

/** The side bar: it shows the kernel of the current document, or says in words why there is nothing to show. */
export class MeshPanel extends Widget {
  readonly visibilityChanged = new Signal<this, void>(this);
  /** Set by who can show a mesh in the main area. */
  openLarge: () => void = () => undefined;
  private readonly _head = element('div', 'mk-Panel-head');
  private readonly _large = button('mk-Button mk-Panel-large', '⤢', () => this.openLarge(), {
    'aria-label': t('Open this mesh in the main area'),
    title: t('Open this mesh in the main area, with plots over time'),
    hidden: true
  });
  private readonly _title = element('h2', 'mk-Panel-title');
  private readonly _status = element('span', 'mk-Panel-status');
  private readonly _icon = element('span', 'mk-Panel-icon');
  private readonly _news = element('span', 'mk-Panel-news');
  private readonly _frame = new FrameTask(() => this._tell());
  private readonly _words = element('div', 'mk-Panel-words');
  private readonly _body = element('div', 'mk-Panel-body');
  private readonly _panes = new Map<KernelLink, KernelPane>();
  private readonly _kept: KeptSection;
  private readonly _theme: Theme;
  private _said = '';
  private _form: UpForm | undefined;

  constructor(
    private readonly _documents: Documents,
    private readonly _surroundings: Surroundings
  ) {
    super();
    this.id = 'monarch-kernel-meshes';
    this.addClass('mk-Panel');
    this.addClass('mk-View');
    this.node.setAttribute('role', 'region');
    this.node.setAttribute('aria-label', t('Meshes'));
    this._status.append(this._icon, this._news);
    this._head.append(this._title, this._status, this._large);
    this.node.append(this._head, this._words, this._body);
    this._theme = new Theme(this.node, () => undefined);
    this._kept = new KeptSection(this.node, () => this._answered(), _surroundings);
    _documents.changed.connect(this._update, this);
    this._update();
  }

  /** What is shown, if there is a mesh or a form to show. */
  get pane(): KernelPane | null {
    const link = this._documents.link;
    return (link && this._panes.get(link)) ?? null;
  }

  /** Do something with the chosen mesh, as its button does. */
  perform(deed: MeshDeed): void {
    this.pane?.perform(deed);
  }

  override dispose(): void {
    if (!this.isDisposed) {
      this._documents.changed.disconnect(this._update, this);
      this._panes.forEach(pane => pane.dispose());
      this._kept.dispose();
      this._theme.dispose();
      this._frame.cancel();
    }
    super.dispose();
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this._shown();
  }

  protected override onAfterHide(message: Message): void {
    super.onAfterHide(message);
    this._shown();
  }

  protected override onActivateRequest(message: Message): void {
    super.onActivateRequest(message);
    const first = this.node.querySelector<HTMLElement>('button:not([hidden]), input');
    (first ?? this.node).focus();
  }

  private _shown(): void {
    this._theme.refresh();
    this._kept.setVisible(this.isVisible);
    this._update();
    this.visibilityChanged.emit();
  }

  /** The kernel, if it has monarch_kernel; one that has just begun is waited for. */
  private async _answered() {
    const link = this._documents.link;
    await link?.answered();
    return link?.state === 'live' ? link.client : null;
  }

  private _update(): void {
    const { current, link } = this._documents;
    setText(this._title, current ? current.title.label : t('Meshes'));
    this._title.title = current?.title.caption ?? '';
    // Links that have gone took their kernels with them.
    for (const [known, pane] of this._panes) {
      if (known.isDisposed) {
        pane.dispose();
        this._panes.delete(known);
      } else {
        pane.setVisible(this.isVisible && known === link);
      }
    }
    if (link && (link.state === 'live' || link.client.store.version >= 0)) {
      let pane = this._panes.get(link);
      if (!pane) {
        pane = new KernelPane(this._body, link.client, this._surroundings, link.kernel.id);
        this._panes.set(link, pane);
        link.client.onConnection(() => this._update());
        link.client.store.subscribe(() => this._frame.request());
      }
      const stale = link.state !== 'live' || link.client.connection === 'gone';
      pane.setStale(stale);
      pane.setVisible(this.isVisible);
      this._say('', link);
      this._tell();
      return;
    }
    this._tell();
    this._say(!current ? 'no document' : !link ? 'no kernel' : link.state, link);
  }

  /** The worst news of all meshes, beside the title: what the eye meets first. */
  private _tell(): void {
    const link = this._documents.link;
    const shown = link && this._panes.has(link) ? link : null;
    const live = shown?.state === 'live' && shown.client.connection !== 'gone';
    this._large.hidden = !shown?.client.store.meshes.size;
    const mesh = live ? worstMesh(shown.client.store) : null;
    showState(this._icon, mesh?.state ?? '');
    setText(this._news, mesh ? mesh.news : shown && !live ? t('not connected') : '');
    setAttribute(this._status, 'data-state', mesh?.state || undefined);
    setAttribute(this._status, 'data-alarm', !!mesh?.state && isTrouble(mesh.state));
    setAttribute(this._status, 'title', mesh ? `${mesh.name}: ${mesh.text}` : undefined);
  }

  /** Say why there is nothing to see, and what can be done about it. */
  private _say(what: string, link: KernelLink | null): void {
    const key = `${what} ${link?.kernel.id ?? ''}`;
    if (key === this._said) {
      return;
    }
    this._said = key;
    this._form?.dispose();
    this._form = undefined;
    const words = (...texts: (Node | string)[]) =>
      this._words.replaceChildren(...texts.map(text => (typeof text === 'string' ? element('p', '', {}, text) : text)));
    switch (what) {
      case '':
        words();
        break;
      case 'no document':
        words(t('Open a notebook or a console: its meshes are shown here.'));
        break;
      case 'no kernel':
        words(t('This document has no kernel. Choose one, and its meshes are shown here.'));
        break;
      case 'foreign':
        words(t('The kernel of this document does not run Python; meshes are Python.'));
        break;
      case 'absent':
        words(
          t('monarch_kernel is not loaded in this kernel.'),
          button('mk-Button mk-mod-main', t('Load it'), () => void this._surroundings.runCode(LOAD), {
            title: t('Runs %1 in a new cell', LOAD)
          }),
          t('Or load it and bring a mesh up:')
        );
        this._form = new UpForm(this._words, null, this._surroundings, `${LOAD}\n`);
        break;
      case 'gone':
        words(t('The kernel has ended. Restart it, and its meshes are shown here.'));
        break;
      default:
        words(t('Waiting for the kernel …'));
    }
  }
}

const LOAD = '%load_ext monarch_kernel';
