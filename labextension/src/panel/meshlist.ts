import type { MeshStore, MeshView } from '../model';
import { endingOf, headlineOf, t } from '../model';
import { button, Disposables, element, moveByArrows, setAttribute, setCutText, setText } from '../views/dom';
import { iconOf, showState } from './worstmesh';

/** The meshes of a kernel, each with its worst news; one of them is chosen. Hidden while there is only one. */
export class MeshList {
  readonly node = element('div', 'mk-MeshList', { role: 'radiogroup' });
  private readonly _items = new Map<string, MeshItem>();
  private readonly _disposables = new Disposables();

  /**
   * @param _choose - called with the key of a mesh.
   */
  constructor(
    host: HTMLElement,
    private readonly _store: MeshStore,
    private readonly _choose: (mesh: string) => void
  ) {
    this.node.setAttribute('aria-label', t('Meshes'));
    moveByArrows(this.node, () => [...this._items.values()].map(item => item.node), this._disposables);
    host.append(this.node);
  }

  update(chosen: string): void {
    const meshes = sortMeshes(this._store.meshes.values());
    this.node.hidden = meshes.length < 2;
    for (const [key, item] of this._items) {
      if (!this._store.meshes.has(key)) {
        item.node.remove();
        this._items.delete(key);
      }
    }
    meshes.forEach((mesh, index) => {
      let item = this._items.get(mesh.key);
      if (!item) {
        item = new MeshItem(() => this._choose(mesh.key));
        this._items.set(mesh.key, item);
      }
      if (this.node.children[index] !== item.node) {
        this.node.insertBefore(item.node, this.node.children[index] ?? null);
      }
      item.update(mesh, this._store, mesh.key === chosen);
    });
  }

  dispose(): void {
    this._disposables.dispose();
    this.node.remove();
  }
}

/** The meshes in the order of their spawning: what is new comes last, and nothing jumps. */
export function sortMeshes(meshes: Iterable<MeshView>): MeshView[] {
  return [...meshes].sort((a, b) => a.created - b.created || a.name.localeCompare(b.name));
}

class MeshItem {
  readonly node: HTMLButtonElement;
  private readonly _icon = element('span', 'mk-MeshList-icon');
  private readonly _name = element('span', 'mk-MeshList-name');
  private readonly _marks = element('span', 'mk-MeshList-marks');
  private readonly _news = element('span', 'mk-MeshList-news');

  constructor(chosen: () => void) {
    this.node = button('mk-MeshList-item', '', chosen, { role: 'radio', tabindex: -1 });
    this.node.append(this._icon, this._name, this._marks, this._news);
  }

  update(mesh: MeshView, store: MeshStore, chosen: boolean): void {
    const ranks = store.ranks(mesh.key);
    const { state, text } = headlineOf(mesh, ranks, endingOf(mesh, store.hosts, store.now()));
    showState(this._icon, iconOf(state));
    setText(this._name, mesh.name || mesh.key);
    const marks = [mesh.current ? t('current') : '', mesh.kept ? t('kept') : ''].filter(Boolean).join(' · ');
    setText(this._marks, marks);
    setCutText(this._news, text);
    setAttribute(this.node, 'aria-checked', String(chosen));
    this.node.tabIndex = chosen ? 0 : -1;
    setAttribute(this.node, 'data-state', state || undefined);
  }
}
