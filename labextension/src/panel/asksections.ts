import type { Actions, MeshStore } from '../model';
import { t } from '../model';
import { stackView } from '../views/details';
import { element, setAttribute, setText } from '../views/dom';
import { doingsOf, Reading } from '../views/reading';
import { wordsOf } from './actionbar';
import type { SectionContent } from './section';

function refusal(error: unknown): Node {
  return element('div', 'mk-Refusal', { role: 'alert' }, wordsOf(error));
}

/** The stacks of all ranks, equal ones together. */
export function stacksSection(host: HTMLElement, store: MeshStore, actions: Actions, mesh: string): SectionContent {
  return new Reading(host, store, {
    again: t('Read again'),
    asking: t('Reading the stacks of all ranks …'),
    ask: async () => stackView((await actions.ask('stack', mesh, [])).stacks),
    about: () => doingsOf(store, mesh),
    refusal
  });
}

/** Why a mesh hangs, if it does. */
export function hangSection(host: HTMLElement, store: MeshStore, actions: Actions, mesh: string): SectionContent {
  const known = element('div', 'mk-Hang-known', { role: 'alert' });
  host.append(known);
  const verdict = () => store.meshes.get(mesh)?.hang ?? '';
  const reading = new Reading(host, store, {
    again: t('Look again'),
    asking: t('Looking at what each rank waits for …'),
    ask: async () => {
      const { hangs, text } = await actions.ask('hang', mesh, []);
      return [element('pre', 'mk-Pre', { 'data-hangs': hangs }, text)];
    },
    about: () => `${verdict()}\n${doingsOf(store, mesh)}`,
    refusal
  });
  let last = verdict();
  const update = () => {
    const now = verdict();
    if (now !== last) {
      last = now;
      reading.clear(); // it says what was so before
      reading.ask();
    }
    // One verdict at a time: the answer says it at length.
    setText(known, reading.isFresh ? '' : now);
    setAttribute(known, 'hidden', !known.textContent);
    reading.update();
  };
  setText(known, last);
  return { update, dispose: () => reading.dispose() };
}
