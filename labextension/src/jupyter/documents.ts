import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { ISessionContext } from '@jupyterlab/apputils';
import { Signal } from '@lumino/signaling';
import type { Widget } from '@lumino/widgets';
import { KernelLink } from './link';

/** A notebook or a console: anything in the main area that has a session of its own. */
export interface KernelDocument extends Widget {
  readonly sessionContext: ISessionContext;
}

function isKernelDocument(widget: Widget | null | undefined): widget is KernelDocument {
  const context = (widget as Partial<KernelDocument> | null | undefined)?.sessionContext;
  return typeof context === 'object' && 'kernelChanged' in context;
}

/** How often changes are wanted of kernels (s); 0: not at all. */
export interface Periods {
  /** Of the kernel of the current document. */
  current: number;
  /** Of all others. */
  others: number;
}

/**
 * The notebooks and consoles of this page, which of them is the current one, and a link to each of their kernels.
 *
 * It asks the shell for them, and not the trackers of notebooks and consoles: so it also follows what other extensions
 * bring, and Notebook 7 without consoles.
 */
export class Documents {
  /** Another document is current, another kernel is, or the current link has another state. */
  readonly changed = new Signal<this, void>(this);
  /** There is a link that was not there before. */
  readonly linkAdded = new Signal<this, KernelLink>(this);
  private readonly _documents = new Set<KernelDocument>();
  private readonly _links = new Map<string, KernelLink>();
  private _current: KernelDocument | null = null;
  private _periods: Periods = { current: 0, others: 0 };

  constructor(private readonly _shell: JupyterFrontEnd.IShell) {
    _shell.currentChanged?.connect(() => this._look());
    document.addEventListener('visibilitychange', () => this._want());
    // Otherwise each reload would leave a subshell behind in the kernel.
    window.addEventListener('pagehide', () => this._links.forEach(link => link.dispose()));
    this._look();
  }

  /** The document that is current, or was before one without a kernel came to the front. */
  get current(): KernelDocument | null {
    return this._current;
  }

  /** The link to the kernel of the current document. */
  get link(): KernelLink | null {
    const id = this._current?.sessionContext.session?.kernel?.id;
    return (id && this._links.get(id)) || null;
  }

  /** The documents of a kernel. */
  of(link: KernelLink): KernelDocument[] {
    return [...this._documents].filter(each => each.sessionContext.session?.kernel?.id === link.kernel.id);
  }

  /** Say how often changes are wanted. */
  want(periods: Periods): void {
    this._periods = periods;
    this._want();
  }

  /** Look through the shell: documents that were restored without coming to the front. */
  refresh(): void {
    this._look();
  }

  private _look(): void {
    for (const widget of this._shell.widgets('main')) {
      if (isKernelDocument(widget)) {
        this._add(widget);
      }
    }
    const widget = this._shell.currentWidget;
    if (isKernelDocument(widget) && widget !== this._current) {
      this._current = widget;
      this._want();
      this.changed.emit();
    }
  }

  private _add(document: KernelDocument): void {
    if (this._documents.has(document)) {
      return;
    }
    this._documents.add(document);
    const { sessionContext } = document;
    sessionContext.kernelChanged.connect(() => this._update());
    sessionContext.connectionStatusChanged.connect(() => this._update());
    document.disposed.connect(() => {
      this._documents.delete(document);
      if (document === this._current) {
        this._current = [...this._documents].at(-1) ?? null;
      }
      this._update();
    });
    this._update();
  }

  /** Make links that are missing, drop those that no document needs. */
  private _update(): void {
    const kernels = new Map<string, KernelLink['kernel']>();
    for (const { sessionContext } of this._documents) {
      const kernel = sessionContext.session?.kernel;
      if (kernel && !kernel.isDisposed && !kernels.has(kernel.id)) {
        kernels.set(kernel.id, kernel);
      }
    }
    for (const [id, link] of [...this._links]) {
      const kernel = kernels.get(id);
      if (!kernel) {
        this._links.delete(id);
        link.dispose();
      } else if (link.kernel.isDisposed) {
        link.use(kernel);
      }
    }
    for (const [id, kernel] of kernels) {
      if (!this._links.has(id)) {
        const link = new KernelLink(kernel);
        this._links.set(id, link);
        link.changed.connect(() => {
          if (link === this.link) {
            this.changed.emit();
          }
        });
        this.linkAdded.emit(link);
      }
    }
    this._want();
    this.changed.emit();
  }

  private _want(): void {
    const current = this.link;
    for (const link of this._links.values()) {
      const period = link === current ? this._periods.current : this._periods.others;
      link.want(document.visibilityState === 'hidden' ? 0 : period);
    }
  }
}
