import type { Headline, MeshStore, RankState } from '../model';
import { endingOf, headlineOf, STATES } from '../model';
import { stateIcon } from '../views/glyphs';

/** A mesh in few words: `text` is all of it, `news` what there is to say beside the number of its ranks. */
export interface MeshNewsLine {
  readonly name: string;
  /** How its worst rank is, for shape and colour; empty: it has none. */
  readonly state: RankState | '';
  readonly news: string;
  readonly text: string;
}

/** The mesh with the worst news, of those the current one. */
export function worstMesh(store: MeshStore): MeshNewsLine | null {
  const order = ['dead', 'hang', 'unresponsive', 'stopped', 'healing', 'walltime', ...STATES] as const;
  const now = store.now();
  const found = [...store.meshes.values()]
    .map(mesh => ({ mesh, ...headlineOf(mesh, store.ranks(mesh.key), endingOf(mesh, store.hosts, now)) }))
    .sort(
      (a, b) =>
        (a.state ? order.indexOf(a.state) : order.length) - (b.state ? order.indexOf(b.state) : order.length) ||
        Number(b.mesh.current) - Number(a.mesh.current)
    )[0];
  if (!found) {
    return null;
  }
  const { mesh, state, news, text } = found;
  return { name: mesh.name, state: iconOf(state), news, text };
}

/** The state whose picture stands for that of a headline. */
export function iconOf(state: Headline['state']): RankState | '' {
  return state === 'hang' || state === 'walltime' ? 'unresponsive' : state;
}

/** Have an element show the picture of a state, or nothing; it is drawn anew only if it differs. */
export function showState(host: HTMLElement, state: RankState | ''): void {
  if (host.dataset['state'] !== state) {
    host.dataset['state'] = state;
    host.replaceChildren(...(state ? [stateIcon(state)] : []));
  }
}
