import type { Actions, Deed, MeshStore, Options } from '../model';
import { countStates, RequestError, runsSomething, t } from '../model';
import { button, Disposables, element, moveByArrows, setAttribute, setText } from '../views/dom';
import type { Surroundings } from './surroundings';

/** What has a button for the whole mesh. */
export const MESH_DEEDS = ['use', 'sync', 'interrupt', 'heal', 'restart', 'down'] as const;

/** What can be done with a whole mesh. */
export type MeshDeed = (typeof MESH_DEEDS)[number];

/** The label of its button. */
export function nameOf(deed: MeshDeed): string {
  switch (deed) {
    case 'use':
      return t('Use');
    case 'sync':
      return t('Sync');
    case 'interrupt':
      return t('Interrupt');
    case 'heal':
      return t('Heal');
    case 'restart':
      return t('Restart');
    case 'down':
      return t('Stop');
  }
}

function helpOf(deed: MeshDeed): string {
  switch (deed) {
    case 'use':
      return t('Run the following cells with %1 on this mesh', '%%mesh');
    case 'sync':
      return t('Send what has changed in your folders to the hosts of this mesh');
    case 'interrupt':
      return t('Interrupt what runs on this mesh');
    case 'heal':
      return t('Replace the dead ranks; the others keep their variables');
    case 'restart':
      return t('Stop this mesh and start it again with the same options; its variables are lost');
    case 'down':
      return t('Stop this mesh and its processes');
  }
}

/** The buttons of a mesh. Each does its deed, or puts the code that does it into a cell. */
export class ActionBar {
  readonly node = element('div', 'mk-Bar');
  private readonly _buttons = new Map<MeshDeed, HTMLButtonElement>();
  private readonly _code: HTMLButtonElement;
  private readonly _result = element('div', 'mk-Bar-result', { role: 'status' });
  private readonly _disposables = new Disposables();
  private _mesh = '';
  private _asCode = false;
  private _running = '';

  constructor(
    host: HTMLElement,
    private readonly _store: MeshStore,
    private readonly _actions: Actions,
    private readonly _surroundings: Surroundings
  ) {
    const row = element('div', 'mk-Bar-row', { role: 'toolbar', 'aria-label': t('Do with this mesh') });
    for (const deed of MESH_DEEDS) {
      const made = button('mk-Button', nameOf(deed), () => void this.perform(deed), { 'data-deed': deed });
      this._buttons.set(deed, made);
      row.append(made);
    }
    this._code = button('mk-Button mk-Bar-code', '</>', () => this._setAsCode(!this._asCode), {
      'aria-label': t('Insert as code'),
      'aria-pressed': 'false',
      title: t('Insert as code: the buttons put the code of what they do into a cell, and do nothing else')
    });
    row.append(this._code);
    moveByArrows(row, () => [...row.querySelectorAll('button')], this._disposables);
    this.node.append(row, this._result);
    host.append(this.node);
    this._setAsCode(_surroundings.memory.get('asCode') === 'yes');
  }

  /** Whether the buttons insert code. */
  get asCode(): boolean {
    return this._asCode;
  }

  update(mesh: string): void {
    if (mesh !== this._mesh) {
      this._mesh = mesh;
      this._say('');
    }
    const view = this._store.meshes.get(mesh);
    const ranks = this._store.ranks(mesh);
    const { states } = countStates(ranks);
    const refusals: Partial<Record<MeshDeed, string>> = {
      use: view?.current ? t('Cells with %1 run on this mesh', '%%mesh') : '',
      heal: states.dead ? '' : t('No rank is dead.'),
      interrupt: ranks.some(runsSomething) ? '' : t('Nothing runs on this mesh.')
    };
    for (const [deed, made] of this._buttons) {
      const refusal = this._running ? t('Wait for: %1', nameOf(this._running as MeshDeed)) : (refusals[deed] ?? '');
      // Not `disabled`: a button keeps the focus, and says why it does nothing.
      setAttribute(made, 'aria-disabled', refusal ? 'true' : undefined);
      setAttribute(made, 'title', refusal || helpOf(deed));
      setAttribute(made, 'data-urgent', deed === 'heal' && states.dead > 0);
    }
  }

  /** Do something, or insert the code that does it. */
  async perform(deed: MeshDeed, asCode = this._asCode): Promise<void> {
    const mesh = this._store.meshes.get(this._mesh);
    if (!mesh || this._buttons.get(deed)?.getAttribute('aria-disabled')) {
      return;
    }
    const ranks = deed === 'heal' ? this._dead() : [];
    const { states } = countStates(this._store.ranks(this._mesh));
    if (asCode) {
      await this._insert(deed, ranks);
      return;
    }
    if (deed === 'down' || deed === 'restart') {
      const consequence = [
        states.running ? t('A cell or an endpoint runs on it.') : '',
        mesh.kept && deed === 'down' ? t('It was kept to outlive this kernel.') : '',
        t('Its processes end, and their variables are lost.')
      ];
      const question = deed === 'down' ? t('Stop the mesh %1?', mesh.name) : t('Restart the mesh %1?', mesh.name);
      if (!(await this._surroundings.confirm(question, consequence.filter(Boolean).join(' '), nameOf(deed)))) {
        return;
      }
    }
    this._running = deed;
    this._say(t('%1 …', nameOf(deed)));
    this.update(this._mesh);
    try {
      // The person was asked, and told that something runs.
      const options = deed === 'down' && states.running ? [{ force: true }] : [];
      const { text } = await this._actions.perform(deed, this._mesh, ranks, ...options);
      this._say(text);
    } catch (error) {
      this._fail(error);
    } finally {
      this._running = '';
      this.update(this._mesh);
    }
  }

  dispose(): void {
    this._disposables.dispose();
    this.node.remove();
  }

  private _dead(): number[] {
    return this._store
      .ranks(this._mesh)
      .filter(rank => rank.state === 'dead')
      .map(rank => rank.rank);
  }

  private async _insert(deed: MeshDeed, ranks: readonly number[]): Promise<void> {
    try {
      const { code } = await askCode(this._actions, deed, this._mesh, ranks);
      await this._surroundings.insertCode(code);
      this._say(t('Inserted: %1', code));
    } catch (error) {
      this._fail(error);
    }
  }

  private _setAsCode(asCode: boolean): void {
    this._asCode = asCode;
    setAttribute(this._code, 'aria-pressed', String(asCode));
    this._surroundings.memory.set('asCode', asCode ? 'yes' : '');
  }

  private _fail(error: unknown): void {
    this._say(wordsOf(error), true);
  }

  private _say(text: string, bad = false): void {
    setText(this._result, text);
    setAttribute(this._result, 'title', text || undefined);
    setAttribute(this._result, 'data-bad', bad);
  }
}

/** The code that does something, as the kernel would write it. */
export function askCode(
  actions: Actions,
  action: Deed,
  mesh: string,
  ranks: readonly number[] = [],
  options: Options = {}
): Promise<{ code: string }> {
  return actions.ask('code', mesh, ranks, { ...options, action });
}

/** Why something failed, in words, with what to do next. */
export function wordsOf(error: unknown): string {
  if (error instanceof RequestError) {
    return [error.message, error.hint].filter(Boolean).join(' ');
  }
  return error instanceof Error ? error.message : String(error);
}
