import type { Actions } from '../model';
import { t, tn } from '../model';
import { button, element, setAttribute, setText } from '../views/dom';
import { askCode, wordsOf } from './actionbar';
import type { KeptMesh, Surroundings } from './surroundings';

/** How often the server is asked while the list is in view (ms): it is not told of changes. */
const EVERY = 10_000;

/** The kept meshes of this user: those that outlive their kernels. Hidden where the server does not list them. */
export class KeptSection {
  readonly node = element('section', 'mk-Section mk-Kept', { hidden: true });
  private readonly _list = element('ul', 'mk-List');
  private readonly _result = element('div', 'mk-Bar-result', { role: 'status' });
  private _timer: ReturnType<typeof setInterval> | undefined;
  private _look = '';
  private _disposed = false;

  /**
   * @param _actions - of the kernel that a mesh is attached to; null without one.
   */
  constructor(
    host: HTMLElement,
    private readonly _actions: () => Actions | null,
    private readonly _surroundings: Surroundings
  ) {
    this.node.setAttribute('aria-label', t('Kept meshes'));
    this.node.append(
      element('h3', 'mk-Heading', { title: t('They outlive their kernels') }, t('Kept meshes')),
      this._list,
      this._result
    );
    host.append(this.node);
  }

  /** Ask while a person can see it. */
  setVisible(visible: boolean): void {
    clearInterval(this._timer);
    this._timer = undefined;
    if (visible && !this._disposed) {
      this._timer = setInterval(() => void this.refresh(), EVERY);
      void this.refresh();
    }
  }

  async refresh(): Promise<void> {
    let meshes: KeptMesh[] | null;
    try {
      meshes = await this._surroundings.kept.list();
    } catch {
      return; // the server is away for a moment: what is shown stays
    }
    if (meshes === null) {
      this.setVisible(false);
      this.node.hidden = true;
      return;
    }
    this.node.hidden = !meshes.length;
    const look = JSON.stringify(meshes);
    if (look !== this._look && !this._disposed) {
      this._look = look;
      this._list.replaceChildren(...meshes.map(mesh => this._item(mesh)));
    }
  }

  dispose(): void {
    this._disposed = true;
    this.setVisible(false);
    this.node.remove();
  }

  private _item(mesh: KeptMesh): HTMLElement {
    const ranks = mesh.meshes.reduce((sum, each) => sum + each.ranks, 0);
    const dead = ranks - mesh.meshes.reduce((sum, each) => sum + each.alive, 0);
    const facts = [
      tn('%1 rank', '%1 ranks', ranks),
      dead ? t('%1 dead', dead) : '',
      mesh.host,
      mesh.held_by ? t('attached') : t('free')
    ];
    const text = facts.filter(Boolean).join(' · ');
    return element(
      'li',
      'mk-Kept-item',
      {},
      element('span', 'mk-Kept-name', {}, mesh.name),
      element('span', 'mk-Faint', { title: text }, text),
      button('mk-Button', t('Attach'), () => void this._attach(mesh.name), {
        'aria-label': t('Attach %1', mesh.name),
        title: t('Attach it to the kernel of this notebook')
      }),
      button('mk-Button', t('Stop'), () => void this._stop(mesh.name), { 'aria-label': t('Stop %1', mesh.name) })
    );
  }

  private async _attach(name: string): Promise<void> {
    const actions = this._actions();
    await this._try(async () => {
      if (!actions) {
        await this._surroundings.insertCode(`%mesh attach ${name}`);
        return t('Inserted: %1', `%mesh attach ${name}`);
      }
      if (this._surroundings.memory.get('asCode') === 'yes') {
        const { code } = await askCode(actions, 'attach', '', [], { name });
        await this._surroundings.insertCode(code);
        return t('Inserted: %1', code);
      }
      return (await actions.perform('attach', '', [], { name })).text;
    });
  }

  private async _stop(name: string): Promise<void> {
    const consequence = t('Its processes end, and their variables are lost.');
    if (await this._surroundings.confirm(t('Stop the kept mesh %1?', name), consequence, t('Stop'))) {
      await this._try(async () => {
        await this._surroundings.kept.stop(name);
        return t('%1 has stopped', name);
      });
    }
  }

  private async _try(deed: () => Promise<string>): Promise<void> {
    try {
      setText(this._result, await deed());
      setAttribute(this._result, 'data-bad', false);
    } catch (error) {
      setText(this._result, wordsOf(error));
      setAttribute(this._result, 'data-bad', true);
    }
    await this.refresh();
  }
}
