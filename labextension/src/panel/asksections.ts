import type { Actions, MeshStore } from '../model';
import { t } from '../model';
import { stackView } from '../views/details';
import { button, element } from '../views/dom';
import { wordsOf } from './actionbar';
import type { SectionContent } from './section';

/** A section whose content is an answer of the kernel, which a button asks for again. */
class Answered implements SectionContent {
  private readonly _page = element('div', 'mk-Answer');
  private readonly _again: HTMLButtonElement;
  private _disposed = false;

  constructor(
    host: HTMLElement,
    again: string,
    private readonly _asking: string,
    private readonly _ask: () => Promise<Node[]>
  ) {
    this._again = button('mk-Button', again, () => this.ask());
    host.append(this._page, element('div', 'mk-Bar-row', {}, this._again));
    this.ask();
  }

  ask(): void {
    this._again.disabled = true;
    if (!this._page.hasChildNodes()) {
      this._page.replaceChildren(element('div', 'mk-Note', {}, this._asking));
    }
    const put = (...nodes: Node[]) => {
      if (!this._disposed) {
        this._again.disabled = false;
        this._page.replaceChildren(...nodes);
      }
    };
    this._ask().then(
      nodes => put(...nodes),
      (error: unknown) => put(element('div', 'mk-Refusal', { role: 'alert' }, wordsOf(error)))
    );
  }

  dispose(): void {
    this._disposed = true;
  }
}

/** The stacks of all ranks, equal ones together. */
export function stacksSection(host: HTMLElement, actions: Actions, mesh: string): SectionContent {
  return new Answered(host, t('Read again'), t('Reading the stacks of all ranks …'), async () =>
    stackView((await actions.ask('stack', mesh, [])).stacks)
  );
}

/** Why a mesh hangs, if it does. */
export function hangSection(host: HTMLElement, store: MeshStore, actions: Actions, mesh: string): SectionContent {
  const known = element('div', 'mk-Hang-known', { role: 'alert' });
  host.append(known);
  const content = new Answered(host, t('Look again'), t('Looking at what each rank waits for …'), async () => {
    const { hangs, text } = await actions.ask('hang', mesh, []);
    return [element('pre', 'mk-Pre', { 'data-hangs': hangs }, text)];
  });
  let last = '';
  const update = () => {
    const verdict = store.meshes.get(mesh)?.hang ?? '';
    if (verdict !== last) {
      known.textContent = last = verdict;
    }
  };
  update();
  return { update, dispose: () => content.dispose() };
}
