import { t } from '../model';
import { showState, worstMesh } from '../panel/worstmesh';
import { button, element, FrameTask, setAttribute, setText } from '../views/dom';
import { Theme } from '../views/theme';
import type { Message } from '@lumino/messaging';
import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';
import type { Documents } from './documents';
import type { KernelLink } from './link';

/** `m: 8 ranks · 1 dead`, in the status bar; pressed, it opens the panel. */
export class StatusItem extends Widget {
  readonly activeChanged = new Signal<this, void>(this);
  private readonly _button: HTMLButtonElement;
  private readonly _icon = element('span', 'mk-Status-icon');
  private readonly _text = element('span', 'mk-Status-text');
  private readonly _frame = new FrameTask(() => this._update());
  private readonly _theme: Theme;
  private _isActive = false;

  constructor(
    private readonly _documents: Documents,
    show: () => void
  ) {
    super();
    this.addClass('mk-Status');
    this.addClass('mk-View');
    this._button = button('mk-Status-button', '', show, { title: t('Show the panel of meshes') });
    this._button.append(this._icon, this._text);
    this.node.append(this._button);
    this._theme = new Theme(this.node, () => undefined);
    const watch = (link: KernelLink) => {
      link.client.store.subscribe(() => this._frame.request());
    };
    _documents.linkAdded.connect((_, link) => watch(link));
    _documents.changed.connect(() => this._frame.request());
  }

  /** Whether there is anything to show. */
  get isActive(): boolean {
    return this._isActive;
  }

  override dispose(): void {
    this._theme.dispose();
    this._frame.cancel();
    super.dispose();
  }

  protected override onAfterAttach(message: Message): void {
    super.onAfterAttach(message);
    this._theme.refresh();
  }

  private _update(): void {
    const link = this._documents.link;
    const mesh = link?.state === 'live' ? worstMesh(link.client.store) : null;
    if (mesh) {
      setText(this._text, `${mesh.name}: ${mesh.text}`);
      showState(this._icon, mesh.state);
      setAttribute(this._button, 'data-state', mesh.state || undefined);
    }
    if (this._isActive !== (mesh !== null)) {
      this._isActive = mesh !== null;
      this.activeChanged.emit();
    }
  }
}
