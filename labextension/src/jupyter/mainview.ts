import type { Message } from '@lumino/messaging';
import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';
import type { FeedClient } from '../model';
import { MeshOverview } from '../panel/overview';

let views = 0;

/** A tab of the main area that shows one mesh of a kernel. */
export class MeshMainView extends Widget {
  readonly visibilityChanged = new Signal<this, void>(this);
  private readonly _overview: MeshOverview;

  constructor(
    client: FeedClient,
    readonly mesh: string
  ) {
    super();
    this.id = `monarch-kernel-mesh-${views++}`;
    this.addClass('mk-View');
    this.addClass('mk-MainView');
    this.title.label = client.store.meshes.get(mesh)?.name ?? mesh;
    this.title.closable = true;
    this.node.tabIndex = -1;
    this._overview = new MeshOverview(this.node, client.store, client, client, mesh);
  }

  override dispose(): void {
    if (!this.isDisposed) {
      this._overview.dispose();
      super.dispose();
      this.visibilityChanged.emit();
      Signal.clearData(this);
    }
  }

  protected override onAfterShow(message: Message): void {
    super.onAfterShow(message);
    this._overview.refresh();
    this.visibilityChanged.emit();
  }

  protected override onAfterHide(message: Message): void {
    super.onAfterHide(message);
    this.visibilityChanged.emit();
  }

  protected override onActivateRequest(message: Message): void {
    super.onActivateRequest(message);
    this.node.focus();
  }
}
