import type { Actions, Dispose } from '../model';
import { t, tn } from '../model';
import { button, element, setAttribute, setText } from '../views/dom';
import { askCode, wordsOf } from './actionbar';
import type { KeptMesh, Surroundings } from './surroundings';

/** The kept meshes of this user: those that outlive their kernels. Hidden where the server does not list them. */
export class KeptSection {
  readonly node = element('section', 'mk-Section mk-Kept', { hidden: true });
  private readonly _list = element('ul', 'mk-List');
  private readonly _result = element('div', 'mk-Bar-result', { role: 'status' });
  private _unwatch: Dispose | undefined;
  private _look = '';

  /**
   * @param _actions - of the kernel that a mesh is attached to, once it is known what it can do; null without one.
   */
  constructor(
    host: HTMLElement,
    private readonly _actions: () => Promise<Actions | null>,
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

  /** Listen while a person can see it. */
  setVisible(visible: boolean): void {
    this._unwatch?.();
    this._unwatch = visible ? this._surroundings.kept.watch(meshes => this._show(meshes)) : undefined;
  }

  dispose(): void {
    this.setVisible(false);
    this.node.remove();
  }

  private _show(meshes: readonly KeptMesh[]): void {
    this.node.hidden = !meshes.length;
    const look = JSON.stringify(meshes);
    if (look !== this._look) {
      this._look = look;
      this._list.replaceChildren(...meshes.map(mesh => this._item(mesh)));
    }
  }

  private _item(mesh: KeptMesh): HTMLElement {
    const ranks = mesh.meshes.reduce((sum, each) => sum + each.ranks, 0);
    const dead = ranks - mesh.meshes.reduce((sum, each) => sum + each.alive, 0);
    const facts = [
      mesh.held_by ? t('attached') : t('free'),
      tn('%1 rank', '%1 ranks', ranks),
      dead ? t('%1 dead', dead) : '',
      t('on %1', mesh.host)
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
        title: mesh.held_by ? t('It is attached to process %1', mesh.held_by) : t('Attach it to this kernel'),
        disabled: mesh.held_by > 0
      }),
      button('mk-Button', t('Stop'), () => void this._stop(mesh), { 'aria-label': t('Stop %1', mesh.name) })
    );
  }

  private async _attach(name: string): Promise<void> {
    await this._try(async () => {
      setText(this._result, t('Waiting for the kernel …'));
      const actions = await this._actions();
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

  private async _stop({ name, held_by }: KeptMesh): Promise<void> {
    const lost = t('Its processes end, and their variables are lost.');
    const consequence = held_by ? `${t('It is attached to process %1.', held_by)} ${lost}` : lost;
    if (await this._surroundings.confirm(t('Stop the kept mesh %1?', name), consequence, t('Stop'))) {
      await this._try(async () => {
        await this._surroundings.kept.stop(name, held_by > 0);
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
  }
}
