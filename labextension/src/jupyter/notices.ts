import type { FailureView, MeshStore } from '../model';
import { formatRanks, t, tn } from '../model';
import { NewFailures } from '../panel/newfailures';
import { Notification } from '@jupyterlab/apputils';
import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { Documents } from './documents';
import type { KernelLink } from './link';

/** Tells of deaths, hangs and the end of walltimes in kernels whose documents are not in view. */
export class Notices {
  /** Whether to tell. */
  isOn = true;

  constructor(
    private readonly _app: JupyterFrontEnd,
    private readonly _documents: Documents,
    private readonly _show: () => void
  ) {
    _documents.linkAdded.connect((_, link) => this._watch(link));
  }

  private _watch(link: KernelLink): void {
    const { store } = link.client;
    const failures = new NewFailures(store);
    store.subscribe(change => {
      if (!change.failures) {
        return;
      }
      const found = failures.take();
      const documents = this._documents.of(link);
      if (found.length && this.isOn && !documents.some(document => document.isVisible)) {
        this._tell(found, store, documents[0]?.title.label ?? '', documents[0]?.id);
      }
    });
  }

  private _tell(failures: FailureView[], store: MeshStore, title: string, id: string | undefined): void {
    const last = failures.at(-1);
    if (!last) {
      return;
    }
    const mesh = store.meshes.get(last.mesh)?.name ?? '';
    const who = last.ranks.length ? tn('rank %2', 'ranks %2', last.ranks.length, formatRanks(last.ranks)) : '';
    const more = failures.length > 1 ? ` ${t('(and %1 more)', failures.length - 1)}` : '';
    Notification.emit(
      `${[title, mesh, who].filter(Boolean).join(' · ')}: ${last.text}${more}`,
      failures.every(({ kind }) => kind === 'walltime') ? 'warning' : 'error',
      {
        autoClose: false,
        actions: [
          {
            label: t('Show'),
            callback: () => {
              if (id) {
                this._app.shell.activateById(id);
              }
              this._show();
            }
          }
        ]
      }
    );
  }
}
