import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { Widget } from '@lumino/widgets';

const panel: JupyterFrontEndPlugin<void> = {
  id: 'monarch-kernel-lab:panel',
  description: 'A panel that shows the meshes of the current kernel.',
  autoStart: true,
  optional: [ITranslator],
  activate: (app: JupyterFrontEnd, translator: ITranslator | null) => {
    const trans = (translator ?? nullTranslator).load('monarch-kernel-lab');
    const widget = new Widget();
    widget.id = 'monarch-kernel-meshes';
    widget.addClass('mk-Panel');
    widget.title.label = trans.__('Meshes');
    widget.title.caption = trans.__('Meshes of the current kernel');
    app.shell.add(widget, 'left', { rank: 900 });
  }
};

export default [panel];
