import { JSONExt } from '@lumino/coreutils';
import type { ReadonlyJSONValue } from '@lumino/coreutils';
import type { ISignal } from '@lumino/signaling';

/** What an output with progress has beside it: the same without; the kernel says the same name. */
export const PROGRESS_MIME = 'application/vnd.monarch-kernel.progress+json';

/** The outputs of a cell, as far as they are needed here. */
export interface CellOutputs {
  readonly length: number;
  get(index: number): { toJSON(): { data?: unknown } };
  set(index: number, output: never): void;
  fromJSON(outputs: never): void;
}

/** The part of a cell's change that concerns its outputs, as `@jupyter/ydoc` reports it. */
interface CellChange {
  readonly outputsChange?: readonly object[];
}

/** A cell in the document that several pages share. */
export interface SharedCell {
  readonly changed: ISignal<unknown, CellChange>;
  getOutputs?(): readonly object[];
  updateOutputs?(...replacement: never[]): void;
  clearOutputs?(...origin: never[]): void;
}

/** A cell of a notebook; those that are no code have no outputs. */
export interface NotebookCell {
  readonly outputs?: CellOutputs;
  readonly sharedModel?: SharedCell;
}

/** The model of a notebook, as far as it is needed here. */
export interface NotebookModel {
  readonly cells: Iterable<NotebookCell> & { readonly changed: ISignal<unknown, unknown> };
  /** Whether several pages may share it. */
  readonly collaborative?: boolean;
}

/**
 * Keep the outputs of a notebook right, from when it is loaded.
 *
 * If only this page may have the notebook, it removes progress that a page has left behind. If several pages may share
 * it, the page that runs a cell may still be there and update its progress, and a second change of the same output could
 * put it twice into the document. So progress is left alone then, but outputs are repaired that JupyterLab has put in
 * the wrong order.
 */
export function maintainOutputs({ cells, collaborative }: NotebookModel): void {
  if (!collaborative) {
    removeProgress(cells);
    return;
  }
  const follow = () => followOutputs(cells);
  follow();
  cells.changed.connect(follow);
}

/** Remove progress lines of cells whose page has gone: nothing updates them any more. */
function removeProgress(cells: Iterable<NotebookCell>): void {
  for (const { outputs } of cells) {
    for (let index = 0; outputs && index < outputs.length; index++) {
      const output = outputs.get(index).toJSON();
      const { [PROGRESS_MIME]: without, ...data } = (output.data ?? {}) as Record<string, unknown>;
      if (typeof without === 'object') {
        outputs.set(index, { ...output, data: { ...data, ...without } } as never);
      }
    }
  }
}

const followed = new WeakSet<SharedCell>();

/** Repair the outputs of each cell after changes by another page. */
function followOutputs(cells: Iterable<NotebookCell>): void {
  for (const { outputs, sharedModel } of cells) {
    if (outputs && sharedModel && !followed.has(sharedModel)) {
      followed.add(sharedModel);
      sharedModel.changed.connect((_, { outputsChange }) => {
        if (outputsChange?.some(part => 'delete' in part)) {
          repairOutputs(outputs, sharedModel);
        }
      });
    }
  }
}

/**
 * Make the outputs that a page shows those of the shared document.
 *
 * When another page replaces an output, JupyterLab appends the new one here, whatever its place
 * (`CodeCellModel._onSharedModelChanged`). The next replacement then removes the wrong one.
 */
function repairOutputs(outputs: CellOutputs, shared: SharedCell): void {
  const wanted = shared.getOutputs?.() ?? [];
  const shown = Array.from(wanted, (_, index) => index < outputs.length && outputs.get(index).toJSON());
  const wrong = [...wanted.keys()].filter(
    index => !JSONExt.deepEqual(wanted[index] as ReadonlyJSONValue, shown[index] as ReadonlyJSONValue)
  );
  // JupyterLab draws what is added to a stream only if the stream was added, too, and not set.
  const hasStream = wrong.some(index => (wanted[index] as { output_type?: unknown }).output_type === 'stream');
  // What is shown is changed, and not the document: it is right, and another page may be changing it.
  const written = { updateOutputs: () => undefined, clearOutputs: () => undefined };
  Object.assign(shared, written);
  try {
    if (outputs.length !== wanted.length || hasStream) {
      outputs.fromJSON(wanted as never);
    } else {
      wrong.forEach(index => outputs.set(index, wanted[index] as never));
    }
  } finally {
    Object.keys(written).forEach(name => Reflect.deleteProperty(shared, name)); // the class has the methods
  }
}
