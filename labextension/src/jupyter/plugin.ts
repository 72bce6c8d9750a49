import { t, useTranslation } from '../model';
import { MESH_DEEDS, nameOf } from '../panel/actionbar';
import type { Memory, Surroundings } from '../panel/surroundings';
import type { JupyterFrontEnd, JupyterFrontEndPlugin } from '@jupyterlab/application';
import { ILayoutRestorer } from '@jupyterlab/application';
import { Dialog, ICommandPalette, showDialog } from '@jupyterlab/apputils';
import type { KernelMessage } from '@jupyterlab/services';
import { ISettingRegistry } from '@jupyterlab/settingregistry';
import { IStatusBar } from '@jupyterlab/statusbar';
import { ITranslator, nullTranslator } from '@jupyterlab/translation';
import { LabIcon } from '@jupyterlab/ui-components';
import { CodeInsertion } from './code';
import { Documents } from './documents';
import { ServerKeptMeshes } from './keptmeshes';
import { Notices } from './notices';
import { StatusItem } from './statusitem';
import { MeshMainView } from './mainview';
import { MeshPanel } from './widget';

const PLUGIN = 'monarch-kernel-lab:panel';

/** How often changes are wanted of kernels that only the status bar and the notices follow (s). */
const IN_THE_BACKGROUND = 2;

const icon = new LabIcon({
  name: 'monarch-kernel-lab:meshes',
  svgstr: `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 24 24"><g class="jp-icon3 jp-icon-selectable" fill="#616161"><path d="M4 4h6v6H4zM14 4h6v6h-6zM4 14h6v6H4z"/><path d="M14 14h6v6h-6zm1.5 1.5v3h3v-3z" fill-rule="evenodd"/></g></svg>`
});

/** The settings, as `schema/panel.json` has them. */
interface PanelSettings {
  period: number;
  statusBar: boolean;
  notifications: boolean;
  confirm: boolean;
}

const DEFAULTS: PanelSettings = { period: 0.2, statusBar: true, notifications: true, confirm: true };

/** The panel of meshes, its commands, the item of the status bar, and notices. */
export const panelPlugin: JupyterFrontEndPlugin<void> = {
  id: PLUGIN,
  description: 'A side bar that shows the meshes of the current kernel.',
  autoStart: true,
  optional: [ITranslator, ISettingRegistry, ILayoutRestorer, ICommandPalette, IStatusBar],
  activate: (
    app: JupyterFrontEnd,
    translator: ITranslator | null,
    registry: ISettingRegistry | null,
    restorer: ILayoutRestorer | null,
    palette: ICommandPalette | null,
    statusBar: IStatusBar | null
  ) => {
    const trans = (translator ?? nullTranslator).load('monarch_kernel_lab');
    useTranslation({
      __: (text, ...values) => trans.__(text, ...values),
      _n: (one, many, count, ...values) => trans._n(one, many, count, ...values)
    });
    const settings = { ...DEFAULTS };
    const documents = new Documents(app.shell);
    const code = new CodeInsertion(app, documents);
    const surroundings: Surroundings = {
      insertCode: text => code.insert(text),
      runCode: text => code.run(text),
      confirm: async (question, consequence, accept) => {
        if (!settings.confirm) {
          return true;
        }
        const buttons = [Dialog.cancelButton(), Dialog.warnButton({ label: accept })];
        return (await showDialog({ title: question, body: consequence, buttons })).button.accept;
      },
      focusRank: (mesh, rank) => focusRank(documents, mesh, rank),
      kept: new ServerKeptMeshes(app.serviceManager.serverSettings),
      memory: new PageMemory()
    };
    const panel = new MeshPanel(documents, surroundings);
    panel.title.icon = icon;
    panel.title.caption = trans.__('Meshes');
    app.shell.add(panel, 'left', { rank: 850, type: 'Meshes' });
    restorer?.add(panel, panel.id);
    const show = () => app.shell.activateById(panel.id);

    const notices = new Notices(app, documents, show);
    const status = new StatusItem(documents, show);
    statusBar?.registerStatusItem(PLUGIN, {
      item: status,
      align: 'left',
      rank: 10,
      isActive: () => status.isActive && settings.statusBar,
      activeStateChanged: status.activeChanged
    });

    const views = new Set<MeshMainView>();
    const want = () => {
      const background = (settings.statusBar && statusBar) || settings.notifications ? IN_THE_BACKGROUND : 0;
      const isSeen = [...views].some(view => view.isVisible);
      notices.isOn = settings.notifications;
      documents.want({
        current: panel.isVisible || isSeen ? settings.period : background,
        others: isSeen ? settings.period : settings.notifications ? IN_THE_BACKGROUND : 0
      });
    };
    panel.openLarge = () => {
      const { link } = documents;
      const mesh = panel.pane?.mesh;
      if (!link || !mesh) {
        return;
      }
      let view = [...views].find(each => each.mesh === mesh);
      if (!view) {
        const made = new MeshMainView(link.client, mesh);
        made.title.icon = icon;
        made.title.caption = trans.__('Mesh %1 of %2', made.title.label, documents.current?.title.label ?? '');
        made.visibilityChanged.connect(want);
        made.disposed.connect(() => views.delete(made));
        views.add(made);
        app.shell.add(made, 'main', { mode: 'split-right' });
        view = made;
      }
      app.shell.activateById(view.id);
      want();
    };
    panel.visibilityChanged.connect(want);
    void app.restored.then(() => {
      documents.refresh();
      want();
    });
    if (registry) {
      void registry.load(PLUGIN).then(loaded => {
        const read = () => {
          Object.assign(settings, loaded.composite);
          status.activeChanged.emit();
          want();
        };
        loaded.changed.connect(read);
        read();
      });
    }
    addCommands(app, panel, show, palette, trans);
  }
};

function addCommands(
  app: JupyterFrontEnd,
  panel: MeshPanel,
  show: () => void,
  palette: ICommandPalette | null,
  trans: { __(text: string, ...values: unknown[]): string }
): void {
  const category = trans.__('Meshes');
  const add = (id: string, label: string, execute: () => void, isEnabled = () => panel.pane !== null) => {
    app.commands.addCommand(`monarch-kernel:${id}`, {
      label,
      isEnabled,
      execute,
      describedBy: { args: { type: 'object', properties: {} } }
    });
    palette?.addItem({ command: `monarch-kernel:${id}`, category });
  };
  add('show', trans.__('Show Meshes'), show, () => true);
  add('up', trans.__('Bring Up a Mesh …'), () => {
    show();
    panel.pane?.openForm(true);
  });
  for (const deed of MESH_DEEDS) {
    add(deed, trans.__('%1 the Chosen Mesh', nameOf(deed)), () => panel.perform(deed));
  }
  add('open', trans.__('Open the Chosen Mesh in the Main Area'), () => panel.openLarge());
  add('next-stop', trans.__('Show the Next Stopped Rank in the Debugger'), () => panel.pane?.nextStop());
  add('log', trans.__('Show the Log of All Ranks'), () => {
    show();
    panel.pane?.openLog();
  });
}

/** Have JupyterLab's own debugger show a stopped rank, which its front end cannot choose itself. */
async function focusRank(documents: Documents, mesh: string, rank: number): Promise<void> {
  const kernel = documents.link?.kernel;
  if (!kernel) {
    throw new Error(t('There is no kernel.'));
  }
  const future = kernel.requestDebug(
    { type: 'request', seq: 0, command: 'mesh/focus', arguments: { rank, ...(mesh ? { mesh } : {}) } },
    true
  );
  const reply: KernelMessage.IDebugReplyMsg = await future.done;
  const { success, message } = reply.content as unknown as { success: boolean; message?: string };
  if (!success) {
    throw new Error(message ?? t('The debugger refused.'));
  }
}

/**
 * Small values that this browser keeps over a reload: what concerns one kernel (`mesh.…`) for this tab, the rest for
 * good.
 */
class PageMemory implements Memory {
  private readonly _values = new Map<string, string>();

  get(key: string): string | undefined {
    try {
      return storageOf(key).getItem(`${PLUGIN}.${key}`) ?? undefined;
    } catch {
      return this._values.get(key); // a browser may refuse to store anything
    }
  }

  set(key: string, value: string): void {
    this._values.set(key, value);
    try {
      storageOf(key).setItem(`${PLUGIN}.${key}`, value);
    } catch {
      // As above.
    }
  }
}

function storageOf(key: string): Storage {
  return key.startsWith('mesh.') ? sessionStorage : localStorage;
}
