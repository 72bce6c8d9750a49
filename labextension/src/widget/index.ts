/** The code of the widget, for anywidget: a live view of a mesh, a chart, or the grid of a comparison, in a notebook. */

import type { FrontEndMessage, KernelMessage } from '../model';
import { FeedClient } from '../model';
import { ComparisonGrid, LineChart, MeshBoard, type ComparisonData } from '../views';
import css from '../views/views.css';

/** What anywidget gives of a widget's model. */
export interface WidgetModel {
  get(name: string): unknown;
  send(content: unknown): void;
  on(name: string, heard: (content: KernelMessage) => void): void;
  off(name: string, heard: (content: KernelMessage) => void): void;
}

export interface RenderArguments {
  model: WidgetModel;
  el: HTMLElement;
}

/** How much of a view must be on the screen to count as seen. */
const SEEN = 0.01;

function text(model: WidgetModel, name: string): string {
  const value = model.get(name);
  return typeof value === 'string' ? value : '';
}

/**
 * Show one view of a model; several may show the same, each with a feed of its own over their one comm.
 *
 * The model has the traits `view` ("mesh", "plot" or "grid"), `mesh` (the key of the mesh to show; empty: all meshes), `ranks`
 * (of that mesh; empty: all), `record` (the text of the mesh when it was shown), of a plot `expression` and `period`
 * (seconds), and of a grid `grid`, which has all that it shows.
 *
 * @returns What ends the view.
 */
export function render({ model, el }: RenderArguments): () => void {
  const style = document.createElement('style');
  style.textContent = css;
  const host = document.createElement('div');
  el.append(style, host);
  const end = text(model, 'view') === 'grid' ? showGrid(model, host) : showLive(model, host);
  return () => {
    end();
    style.remove();
    host.remove();
  };
}

/** Show a view that needs nothing of the kernel; its colours are those of the page once it is in it. */
function showGrid(model: WidgetModel, host: HTMLElement): () => void {
  const grid = new ComparisonGrid(host, model.get('grid') as ComparisonData);
  const observer = new IntersectionObserver(() => grid.refresh());
  observer.observe(host);
  return () => {
    observer.disconnect();
    grid.dispose();
  };
}

/** Show a view that the kernel feeds, as long as it is on the screen. */
function showLive(model: WidgetModel, host: HTMLElement): () => void {
  const client = new FeedClient((message: FrontEndMessage) => model.send(message));
  const heard = (message: KernelMessage) => client.receive(message);
  model.on('msg:custom', heard);

  const mesh = text(model, 'mesh');
  const ranks = (model.get('ranks') as number[] | undefined) ?? [];
  let view: LineChart | MeshBoard;
  if (text(model, 'view') === 'plot') {
    const expression = text(model, 'expression');
    const period = Number(model.get('period')) || 1;
    const chart = new LineChart(host, expression, client, { mesh, ranks, expression, period });
    client.onConnection(connection => chart.setGone(connection === 'gone'));
    view = chart;
  } else {
    const record = text(model, 'record');
    view = new MeshBoard(host, client.store, client, { connection: client, ranks, record, ...(mesh ? { mesh } : {}) });
  }

  let onScreen = false;
  const see = () => client.setVisible(onScreen && document.visibilityState !== 'hidden');
  const observer = new IntersectionObserver(
    entries => {
      onScreen = entries.at(-1)?.isIntersecting ?? false;
      see();
      if (onScreen && view instanceof MeshBoard) {
        view.refresh();
      }
    },
    { threshold: [0, SEEN] }
  );
  observer.observe(host);
  document.addEventListener('visibilitychange', see);

  return () => {
    observer.disconnect();
    document.removeEventListener('visibilitychange', see);
    model.off('msg:custom', heard);
    view.dispose();
    client.dispose();
  };
}

export default { render };
