import { t } from '../model';
import type { JupyterFrontEnd } from '@jupyterlab/application';
import type { Documents } from './documents';

/** Puts code where a person would type it: a new cell of the current notebook, or the prompt of the current console. */
export class CodeInsertion {
  constructor(
    private readonly _app: JupyterFrontEnd,
    private readonly _documents: Documents
  ) {}

  /** Insert code, and do not run it. */
  async insert(code: string): Promise<void> {
    if (await this._isNotebook()) {
      await this._cell(code);
    } else {
      await this._app.commands.execute('console:replace-selection', { text: code });
    }
  }

  /** Insert code and run it. */
  async run(code: string): Promise<void> {
    if (await this._isNotebook()) {
      await this._cell(code);
      await this._app.commands.execute('notebook:run-cell');
    } else {
      const path = this._documents.current?.sessionContext.path;
      await this._app.commands.execute('console:inject', { path, code, activate: false });
    }
  }

  private async _cell(code: string): Promise<void> {
    const { commands } = this._app;
    await commands.execute('notebook:insert-cell-below');
    await commands.execute('notebook:replace-selection', { text: code });
  }

  /** Whether the current document is a notebook; it comes to the front, as the commands are about that one. */
  private async _isNotebook(): Promise<boolean> {
    const { current } = this._documents;
    if (!current) {
      throw new Error(t('There is no notebook or console to put code into.'));
    }
    const { shell } = this._app;
    if (shell.currentWidget !== current) {
      shell.activateById(current.id);
    }
    return current.sessionContext.type === 'notebook';
  }
}
