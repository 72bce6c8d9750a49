import type { Dispose } from '../model';

/** What the panel needs of the application that it is in. */
export interface Surroundings {
  /** Put code into a new cell below the active one, or into the prompt of a console. */
  insertCode(code: string): Promise<void>;
  /** Put code into a cell and run it. */
  runCode(code: string): Promise<void>;
  /** Ask a person before something that cannot be undone. */
  confirm(question: string, consequence: string, accept: string): Promise<boolean>;
  /** Have JupyterLab's own debugger show a stopped rank; rejects with why it cannot. */
  focusRank(mesh: string, rank: number): Promise<void>;
  /** Kept meshes, through the Jupyter server. */
  readonly kept: KeptMeshes;
  /** What was opened and chosen, which outlives a reload. */
  readonly memory: Memory;
}

/** A kept mesh, as the server lists it (`monarch_kernel/server/openapi.json`). */
export interface KeptMesh {
  readonly name: string;
  readonly host: string;
  /** The process that holds it; 0: none does. */
  readonly held_by: number;
  readonly meshes: readonly { readonly name: string; readonly ranks: number; readonly alive: number }[];
}

/** The kept meshes of this user. */
export interface KeptMeshes {
  /** Be told which there are, at once and at each change; never, where the server does not say. */
  watch(changed: (meshes: readonly KeptMesh[]) => void): Dispose;
  /** End one; `force`: also if a process holds it, which then loses it. */
  stop(name: string, force: boolean): Promise<void>;
}

/** Small values that outlive a reload. */
export interface Memory {
  get(key: string): string | undefined;
  set(key: string, value: string): void;
}
