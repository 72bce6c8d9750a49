import type { ISessionContext } from '@jupyterlab/apputils';
import type { Kernel } from '@jupyterlab/services';
import type { ReadonlyPartialJSONObject } from '@lumino/coreutils';
import type { Widget } from '@lumino/widgets';
import { Panel } from '@lumino/widgets';
import { DOWN } from './link';

/** What a cell's output has beside its HTML where the front end can show it live; the kernel says the same names. */
export const OUTPUT_MIME = 'application/vnd.monarch-kernel.view+json';
/** The view itself, which the manager of Jupyter's widgets shows. */
export const WIDGET_MIME = 'application/vnd.jupyter.widget-view+json';
const HTML_MIME = 'text/html';
const TEXT_MIME = 'text/plain';

/** An output of a cell, as JupyterLab has it. */
export interface OutputModel {
  readonly trusted: boolean;
  readonly data: ReadonlyPartialJSONObject;
  readonly metadata: ReadonlyPartialJSONObject;
  setData(options: object): void;
}

/** A widget that shows an output. */
export interface OutputRenderer extends Widget {
  renderModel(model: OutputModel): Promise<void>;
}

/** Makes what shows outputs: the registry of a notebook. */
export interface OutputRenderers {
  getFactory(mimeType: string): unknown;
  createRenderer(mimeType: string): OutputRenderer;
}

/** What is asked of a notebook's session. */
export type OutputSession = Pick<ISessionContext, 'ready' | 'kernelChanged' | 'statusChanged'> & {
  readonly session: { readonly kernel: Kernel.IKernelConnection | null } | null;
};

/** Which live views the kernel of a notebook has: all of its outputs share what it answers. */
export class KernelModels {
  private _asked: { kernel: Kernel.IKernelConnection; answer: Promise<ReadonlySet<string>> } | null = null;

  constructor(readonly session: OutputSession) {}

  /** Whether this page has the model: as of a view whose cell has just run. */
  knows(model: string): boolean {
    return this._kernel?.hasComm(model) ?? false;
  }

  /** Whether the kernel has the model; a kernel that runs a cell answers after it. */
  async has(model: string): Promise<boolean> {
    await this.session.ready;
    const kernel = this._kernel;
    return !!kernel && (kernel.hasComm(model) || (await this._ask(kernel)).has(model));
  }

  private get _kernel(): Kernel.IKernelConnection | null {
    const kernel = this.session.session?.kernel;
    return kernel && !kernel.isDisposed && !DOWN.includes(kernel.status) ? kernel : null;
  }

  private _ask(kernel: Kernel.IKernelConnection): Promise<ReadonlySet<string>> {
    if (this._asked?.kernel !== kernel) {
      const asked = { kernel, answer: listModels(kernel) };
      this._asked = asked;
      void asked.answer.then(() => {
        this._asked = this._asked === asked ? null : this._asked;
      });
    }
    return this._asked.answer;
  }
}

/** The models of a kernel, which are comms of the same names; none if it goes meanwhile. */
async function listModels(kernel: Kernel.IKernelConnection): Promise<ReadonlySet<string>> {
  try {
    const { content } = await kernel.requestCommInfo({ target_name: 'jupyter.widget' });
    return new Set(content.status === 'ok' ? Object.keys(content.comms) : []);
  } catch {
    return new Set();
  }
}

/**
 * A view in the output of a cell: live while the kernel has it, else the HTML, or text, of when the cell ran.
 *
 * Without this, JupyterLab shows the view of a notebook that is opened again as an error, and never what is beside it.
 */
export class OutputView extends Panel implements OutputRenderer {
  private _model: OutputModel | null = null;
  private _html: OutputRenderer | null = null;
  private _live: OutputRenderer | null = null;
  /** The model of the output's view; `''`: it has none. */
  private _id: string | null = null;
  private _isSeen = false;
  private readonly _observer = new MutationObserver(() => this._look());

  constructor(
    private readonly _renderers: OutputRenderers,
    private readonly _models: KernelModels
  ) {
    super();
    _models.session.kernelChanged.connect(this._kernelChanged, this);
    _models.session.statusChanged.connect(this._statusChanged, this);
  }

  async renderModel(model: OutputModel): Promise<void> {
    this._model = model;
    const id = modelOf(model);
    if (id !== this._id) {
      this._id = id;
      this._end();
      this._endHtml();
      await this._choose();
    } else {
      await this._html?.renderModel(model);
    }
  }

  override dispose(): void {
    if (!this.isDisposed) {
      this._models.session.kernelChanged.disconnect(this._kernelChanged, this);
      this._models.session.statusChanged.disconnect(this._statusChanged, this);
      this._observer.disconnect();
    }
    super.dispose();
  }

  private _kernelChanged(): void {
    this._end();
    void this._choose();
  }

  private _statusChanged(_: unknown, status: Kernel.Status): void {
    if (DOWN.includes(status)) {
      this._end();
      void this._showHtml();
    }
  }

  private async _choose(): Promise<void> {
    if (this._id && this._models.knows(this._id)) {
      await this._showLive();
    } else {
      await this._showHtml();
      void this._find();
    }
  }

  /** Ask the kernel for the live view. */
  private async _find(): Promise<void> {
    const id = this._id;
    if (id && (await this._models.has(id)) && id === this._id && !this._live && !this.isDisposed) {
      await this._showLive();
    }
  }

  /** Show the live view once it is there. */
  private async _showLive(): Promise<void> {
    const model = this._model;
    const view = model?.data[WIDGET_MIME];
    if (!model || !view || !this._renderers.getFactory(WIDGET_MIME)) {
      await this._showHtml();
      return;
    }
    const live = this._renderers.createRenderer(WIDGET_MIME);
    this._live = live;
    live.hide();
    this.addWidget(live);
    this._observer.observe(live.node, { childList: true });
    // A copy: the manager of widgets takes the model out of it when the view ends, and a notebook is saved with that.
    const data = { [WIDGET_MIME]: structuredClone(view) };
    await live.renderModel({ trusted: true, data, metadata: model.metadata, setData: () => undefined });
    this._look();
    if (!this._isSeen) {
      await this._showHtml(); // until the manager of widgets has the model, if ever
    }
  }

  /** Look whether the live view is there, or has ended. */
  private _look(): void {
    const live = this._live;
    if (!live) {
      return;
    }
    if ([...live.node.children].some(child => !child.querySelector(ERROR))) {
      this._isSeen = true;
      this._endHtml();
      live.show();
    } else if (this._isSeen) {
      this._end();
      void this._showHtml();
    }
  }

  /** End the live view. */
  private _end(): void {
    this._isSeen = false;
    this._observer.disconnect();
    this._live?.dispose();
    this._live = null;
  }

  private async _showHtml(): Promise<void> {
    if (this._model && !this._html && !this.isDisposed) {
      this._html = this._renderers.createRenderer(HTML_MIME in this._model.data ? HTML_MIME : TEXT_MIME);
      this.addWidget(this._html);
      await this._html.renderModel(this._model);
    }
  }

  private _endHtml(): void {
    this._html?.dispose();
    this._html = null;
  }
}

/** What the manager of widgets puts into its renderer where it has no code for a view. */
const ERROR = '.jupyter-widgets-error-widget';

/**
 * The model of an output's view; none if the output names two.
 *
 * A page shows it only if the kernel has that model, so that the code of the view came from the kernel and not from the
 * notebook. Whether the notebook is trusted does not matter: of several pages that share one, only the page that ran a
 * cell trusts its outputs.
 */
function modelOf({ data }: OutputModel): string {
  const [model, shown] = [OUTPUT_MIME, WIDGET_MIME].map(
    type => (data[type] as { model_id?: unknown } | undefined)?.model_id
  );
  return typeof model === 'string' && model === shown ? model : '';
}
