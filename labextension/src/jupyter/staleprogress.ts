/** What an output with progress has beside it: the same without; the kernel says the same name. */
export const PROGRESS_MIME = 'application/vnd.monarch-kernel.progress+json';

/** The outputs of a cell, as far as they are needed here. */
export interface CellOutputs {
  readonly length: number;
  get(index: number): { toJSON(): { data?: unknown } };
  set(index: number, output: never): void;
}

/** Cells of a notebook, those that are no code without outputs. */
export type Cells = Iterable<{ readonly outputs?: CellOutputs }>;

/** Remove progress lines of cells whose page has gone: nothing updates them any more. */
export function removeProgress(cells: Cells): void {
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
