import { describe, expect, it } from 'vitest';
import { PROGRESS_MIME, removeProgress } from './staleprogress';

function outputsOf(...all: object[]) {
  const outputs = [...all];
  return {
    outputs: {
      length: outputs.length,
      get: (index: number) => ({ toJSON: () => outputs[index] as { data?: unknown } }),
      set: (index: number, output: object) => void (outputs[index] = output)
    },
    all: outputs
  };
}

describe('removeProgress', () => {
  it('removes the lines of progress alone', () => {
    const text = (plain: string) => ({ 'text/plain': plain, 'text/html': `<pre>${plain}</pre>` });
    const cell = outputsOf(
      { output_type: 'stream', name: 'stdout', text: '0 of 4 ranks done' },
      {
        output_type: 'display_data',
        metadata: {},
        data: { ...text('[0] step 7\n0 of 4 ranks done'), [PROGRESS_MIME]: text('[0] step 7') }
      },
      { output_type: 'display_data', data: { 'text/plain': '3' } }
    );
    removeProgress([{}, cell]);
    expect(cell.all).toEqual([
      { output_type: 'stream', name: 'stdout', text: '0 of 4 ranks done' },
      { output_type: 'display_data', metadata: {}, data: text('[0] step 7') },
      { output_type: 'display_data', data: { 'text/plain': '3' } }
    ]);
  });
});
