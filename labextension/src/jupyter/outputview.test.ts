import type { Kernel } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';
import { Widget } from '@lumino/widgets';
import { afterEach, describe, expect, it, vi } from 'vitest';
import { settled } from '../testing';
import type { OutputModel } from './outputview';
import { KernelModels, OUTPUT_MIME, OutputView, WIDGET_MIME } from './outputview';

// Widgets name it when they are imported, and jsdom has none.
vi.hoisted(() => Object.assign(globalThis, { DragEvent: Event }));

/** A kernel as an output sees it: the models that it has, and those that this page has got of it. */
class KernelWithModels {
  readonly isDisposed = false;
  status: Kernel.Status = 'idle';
  readonly here = new Set<string>();
  asked = 0;
  answer: (models: readonly string[]) => void = () => undefined;
  fail: () => void = () => undefined;

  hasComm = (model: string) => this.here.has(model);

  requestCommInfo() {
    this.asked++;
    return new Promise((resolve, reject) => {
      this.answer = models =>
        resolve({ content: { status: 'ok', comms: Object.fromEntries(models.map(model => [model, {}])) } });
      this.fail = () => reject(new Error('gone'));
    });
  }
}

class NotebookSession {
  readonly ready = Promise.resolve();
  readonly kernelChanged = new Signal<this, unknown>(this);
  readonly statusChanged = new Signal<this, Kernel.Status>(this);
  session: { kernel: KernelWithModels | null } = { kernel: null };

  use(kernel: KernelWithModels | null) {
    this.session = { kernel };
    this.kernelChanged.emit({});
  }

  become(status: Kernel.Status) {
    if (this.session.kernel) {
      this.session.kernel.status = status;
    }
    this.statusChanged.emit(status);
  }
}

/** The manager's renderer: it shows views of models that it has, when it has them. */
class WidgetRenderer extends Widget {
  static readonly all: WidgetRenderer[] = [];
  model: OutputModel | null = null;

  constructor(private readonly _loaded: ReadonlyMap<string, string>) {
    super();
    WidgetRenderer.all.push(this);
  }

  async renderModel(model: OutputModel) {
    this.model = model;
    this.node.textContent = 'Loading widget...';
    await Promise.resolve();
    const { model_id } = model.data[WIDGET_MIME] as { model_id: string };
    const html = this._loaded.get(model_id);
    this.node.innerHTML = html ? `<div>${html}</div>` : 'Error displaying widget: model not found';
  }
}

class HtmlRenderer extends Widget {
  async renderModel({ data }: OutputModel) {
    this.node.innerHTML = data['text/html'] as string;
  }
}

const output = (model: string, html = `state of ${model}`, trusted = true): OutputModel => ({
  trusted,
  data: { 'text/html': html, [WIDGET_MIME]: { model_id: model }, [OUTPUT_MIME]: { model_id: model } },
  metadata: {},
  setData: () => undefined
});

/** A notebook with a kernel, and a view in it. */
function notebook(kernel: KernelWithModels | null, hasManager = true) {
  const session = new NotebookSession();
  session.session = { kernel };
  const loaded = new Map<string, string>();
  const models = new KernelModels(session as never);
  const renderers = {
    getFactory: (type: string) => (type === WIDGET_MIME && !hasManager ? undefined : {}),
    createRenderer: (type: string) => (type === WIDGET_MIME ? new WidgetRenderer(loaded) : new HtmlRenderer())
  };
  const views: OutputView[] = [];
  const add = () => {
    const view = new OutputView(renderers, models);
    views.push(view);
    Widget.attach(view, document.body);
    return view;
  };
  const shown = (view = views[0]) =>
    view?.widgets.map(each => (each.isHidden ? '' : each.node.textContent)).join('') ?? '';
  return { session, loaded, view: add(), add, shown };
}

afterEach(() => {
  document.body.replaceChildren();
  WidgetRenderer.all.length = 0;
});

describe('OutputView', () => {
  it('is live at once where the cell has just run, and stays so when its output is updated', async () => {
    const kernel = new KernelWithModels();
    const { loaded, view, shown } = notebook(kernel);
    kernel.here.add('v1');
    loaded.set('v1', 'live v1');
    await view.renderModel(output('v1'));
    expect(shown()).toBe('live v1');
    expect(view.widgets).toHaveLength(1);
    await view.renderModel(output('v1', 'later'));
    expect(shown()).toBe('live v1');
    expect(WidgetRenderer.all).toHaveLength(1);
    expect(kernel.asked).toBe(0);
    await view.renderModel(output('v2'));
    expect(shown()).toBe('state of v2');
  });

  it('is HTML without a kernel, and without asking for the live view', async () => {
    const { view, shown, session } = notebook(null);
    await view.renderModel(output('v1'));
    await settled();
    expect(shown()).toBe('state of v1');
    await view.renderModel(output('v1', 'later'));
    expect(shown()).toBe('later');
    const kernel = new KernelWithModels();
    session.use(kernel);
    await settled();
    kernel.answer(['other']);
    await settled();
    expect(shown()).toBe('later');
    expect(WidgetRenderer.all).toHaveLength(0);
  });

  it('is HTML until a kernel that has the view says so, which is asked once for all outputs', async () => {
    const kernel = new KernelWithModels();
    const { loaded, view, add, shown } = notebook(kernel);
    const other = add();
    await Promise.all([view.renderModel(output('v1')), other.renderModel(output('v2'))]);
    await settled();
    expect([shown(), shown(other)]).toEqual(['state of v1', 'state of v2']);
    expect(kernel.asked).toBe(1);
    kernel.answer(['v1']);
    await settled();
    // The manager of widgets has not got the model yet.
    expect([shown(), shown(other)]).toEqual(['state of v1', 'state of v2']);
    loaded.set('v1', 'live v1');
    const [renderer] = WidgetRenderer.all;
    await renderer?.renderModel(renderer.model ?? output('v1'));
    await settled();
    expect([shown(), shown(other)]).toEqual(['live v1', 'state of v2']);
  });

  it.each(['restarting', 'autorestarting', 'dead'] as const)('is HTML when the kernel is %s', async status => {
    const kernel = new KernelWithModels();
    const { session, loaded, view, shown } = notebook(kernel);
    kernel.here.add('v1');
    loaded.set('v1', 'live v1');
    await view.renderModel(output('v1'));
    session.become(status);
    expect(shown()).toBe('state of v1');
    session.become('idle');
    await settled();
    expect(shown()).toBe('state of v1');
  });

  it('is HTML when the kernel closes the view, and the output keeps its model', async () => {
    const kernel = new KernelWithModels();
    const { loaded, view, shown } = notebook(kernel);
    kernel.here.add('v1');
    loaded.set('v1', 'live v1');
    const model = output('v1');
    await view.renderModel(model);
    const [renderer] = WidgetRenderer.all;
    (renderer?.model?.data[WIDGET_MIME] as { model_id: string }).model_id = '';
    renderer?.node.replaceChildren();
    await settled();
    expect(shown()).toBe('state of v1');
    expect(model.data[WIDGET_MIME]).toEqual({ model_id: 'v1' });
  });

  it('is live where another page has run the cell, and this one does not trust its output', async () => {
    const kernel = new KernelWithModels();
    const { loaded, view, add, shown } = notebook(kernel);
    loaded.set('v1', 'live v1');
    await view.renderModel(output('v1', 'state of v1', false));
    await settled();
    kernel.answer(['v1']);
    await settled();
    expect(shown()).toBe('live v1');
    // An output that says it is that view, and brings another one, which may be the notebook's own.
    loaded.set('other', 'from the notebook');
    const forged = output('v1', 'forged', false);
    const foreign = add();
    await foreign.renderModel({ ...forged, data: { ...forged.data, [WIDGET_MIME]: { model_id: 'other' } } });
    await settled();
    expect(shown(foreign)).toBe('forged');
    expect(WidgetRenderer.all).toHaveLength(1);
  });

  it('is HTML where the page has no code for widgets, or no manager of them', async () => {
    const kernel = new KernelWithModels();
    const { loaded, view, shown } = notebook(kernel);
    kernel.here.add('v1');
    loaded.set('v1', '<div class="jupyter-widgets-error-widget">Failed to load</div>');
    await view.renderModel(output('v1'));
    expect(shown()).toBe('state of v1');
    const bare = notebook(kernel, false);
    await bare.view.renderModel(output('v1'));
    expect(bare.shown()).toBe('state of v1');
  });

  it('is HTML when the kernel goes while it is asked, and leaves nothing behind', async () => {
    const kernel = new KernelWithModels();
    const { view, shown, session } = notebook(kernel);
    await view.renderModel(output('v1'));
    await settled();
    kernel.fail();
    await settled();
    expect(shown()).toBe('state of v1');
    session.use(kernel);
    await settled();
    view.dispose();
    kernel.answer(['v1']);
    await settled();
    expect(WidgetRenderer.all).toHaveLength(0);
    session.become('restarting');
    expect(document.body.children).toHaveLength(0);
  });
});
