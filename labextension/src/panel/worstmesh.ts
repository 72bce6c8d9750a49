import type { MeshStore } from '../model';
import { headlineOf, STATES } from '../model';

/** The mesh that the status bar names: the one with the worst news, of those the current one. */
export function worstMesh(store: MeshStore): { name: string; state: string; text: string } | null {
  const order = ['dead', 'hang', ...STATES] as const;
  const found = [...store.meshes.values()]
    .map(mesh => ({ mesh, ...headlineOf(mesh, store.ranks(mesh.key)) }))
    .sort(
      (a, b) =>
        (a.state ? order.indexOf(a.state) : order.length) - (b.state ? order.indexOf(b.state) : order.length) ||
        Number(b.mesh.current) - Number(a.mesh.current)
    )[0];
  return found ? { name: found.mesh.name, state: found.state, text: found.text } : null;
}
