import { YNotebook } from '@jupyter/ydoc';
import type { YCodeCell } from '@jupyter/ydoc';
import { Signal } from '@lumino/signaling';
import { describe, expect, it } from 'vitest';
import * as Y from 'yjs';
import type { CellOutputs, NotebookCell } from './notebookoutputs';
import { maintainOutputs, PROGRESS_MIME } from './notebookoutputs';

/** Outputs as JupyterLab has them in one page. */
class PageOutputs implements CellOutputs {
  all: object[];

  constructor(...outputs: object[]) {
    this.all = outputs;
  }

  get length() {
    return this.all.length;
  }

  get(index: number) {
    return { toJSON: () => this.all[index] as { data?: unknown } };
  }

  set(index: number, output: never) {
    this.all[index] = output;
  }

  fromJSON(outputs: never) {
    this.all = [...(outputs as object[])];
  }
}

const text = (plain: string) => ({ 'text/plain': plain, 'text/html': `<pre>${plain}</pre>` });
const shows = (plain: string, more: object = {}) => ({
  output_type: 'display_data',
  metadata: {},
  data: { ...text(plain), ...more }
});
const IN_PROGRESS = shows('[0] step 7\n0 of 4 ranks done', { [PROGRESS_MIME]: text('[0] step 7') });

/** A page that loads a notebook. */
function load(cells: NotebookCell[], collaborative: boolean) {
  maintainOutputs({ cells: Object.assign(cells, { changed: new Signal<unknown, unknown>({}) }), collaborative });
}

describe('maintainOutputs', () => {
  it('removes the lines of progress alone when a page loads a notebook of its own', () => {
    const stream = { output_type: 'stream', name: 'stdout', text: '0 of 4 ranks done' };
    const outputs = new PageOutputs(stream, IN_PROGRESS, { output_type: 'display_data', data: { 'text/plain': '3' } });
    load([{}, { outputs }], false);
    expect(outputs.all).toEqual([
      stream,
      shows('[0] step 7'),
      { output_type: 'display_data', data: { 'text/plain': '3' } }
    ]);
  });

  it('leaves progress in a shared notebook to the page that runs the cell', () => {
    const outputs = new PageOutputs(IN_PROGRESS);
    load([{ outputs }], true);
    expect(outputs.all).toEqual([IN_PROGRESS]);
  });

  it('shows the outputs of the shared document after replacements by another page, and writes nothing there', () => {
    // Two pages with one document, and what JupyterLab makes of the other page's change.
    const [theirs, mine] = [YNotebook.create(), new YNotebook()];
    Y.applyUpdate(mine.ydoc, Y.encodeStateAsUpdate(theirs.ydoc));
    theirs.ydoc.on('update', update => Y.applyUpdate(mine.ydoc, update));
    theirs.addCell({ cell_type: 'code', outputs: ['a', 'b', 'c'].map(plain => shows(plain)) } as never);
    const [cell, shared] = [theirs.getCell(0) as YCodeCell, mine.getCell(0) as YCodeCell];
    const outputs = new PageOutputs(...shared.getOutputs());
    // JupyterLab writes what is changed in the page into the document, and appends what the other page has replaced.
    const set = outputs.set.bind(outputs);
    outputs.set = (index, output) => {
      set(index, output);
      shared.updateOutputs(index, index + 1, [output]);
    };
    shared.changed.connect(() => (outputs.all = ['b', 'c', 'a2'].map(plain => shows(plain))));
    load([{ outputs, sharedModel: shared as never }], true);
    let written = 0;
    mine.ydoc.on('update', (_, __, ___, transaction) => (written += transaction.local ? 1 : 0));
    cell.updateOutputs(0, 1, [shows('a2')] as never);
    expect(outputs.all).toEqual(['a2', 'b', 'c'].map(plain => shows(plain)));
    expect(shared.getOutputs()).toEqual(outputs.all);
    expect(written).toBe(0);
    outputs.set(1, shows('mine') as never);
    expect(written).toBe(1);
  });
});
