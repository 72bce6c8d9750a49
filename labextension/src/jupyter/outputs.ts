import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import type { Widget } from '@lumino/widgets';
import type { KernelDocument } from './documents';
import { FIGURE_MIME, RankFigure } from './figures';
import type { NotebookModel } from './notebookoutputs';
import { maintainOutputs } from './notebookoutputs';
import type { OutputRenderer, OutputRenderers } from './outputview';
import { KernelModels, OUTPUT_MIME, OutputView } from './outputview';

/** Before the manager of widgets, whose rank is -10. */
const RANK = -20;

/** The registry of a notebook, as far as it is of use here. */
interface Registry extends OutputRenderers {
  addFactory(
    factory: { safe: boolean; mimeTypes: readonly string[]; createRenderer: () => OutputRenderer },
    rank: number
  ): void;
}

/** Views in the outputs of cells, in notebooks; all other documents show them as Jupyter's widgets. */
export const outputsPlugin: JupyterFrontEndPlugin<void> = {
  id: 'monarch-kernel-lab:outputs',
  description: 'Shows meshes live in outputs of cells, or as HTML without a kernel, and figures of ranks side by side.',
  autoStart: true,
  activate: (app: JupyterFrontEnd) => {
    app.docRegistry.addWidgetExtension('Notebook', {
      createNew: (
        panel: Widget & Partial<KernelDocument> & { readonly content?: { readonly rendermime?: Registry } },
        context
      ) => {
        void context.ready.then(() => maintainOutputs(context.model as unknown as NotebookModel));
        const registry = panel.content?.rendermime;
        if (registry && panel.sessionContext) {
          const models = new KernelModels(panel.sessionContext);
          // As safe as its HTML: what is live came from the kernel, and nothing of the notebook is run.
          const createRenderer = () => new OutputView(registry, models);
          registry.addFactory({ safe: true, mimeTypes: [OUTPUT_MIME], createRenderer }, RANK);
          const figure = () => new RankFigure(registry);
          registry.addFactory({ safe: true, mimeTypes: [FIGURE_MIME], createRenderer: figure }, RANK);
        }
      }
    });
  }
};
