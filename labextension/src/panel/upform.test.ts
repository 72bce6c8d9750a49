import { describe, expect, it } from 'vitest';
import { lineOf, readOptions } from './upform';

describe('the form that brings a mesh up', () => {
  it('reads a number of processes', () => {
    expect(readOptions(' m ', ' 8 ', false, false)).toEqual({ name: 'm', procs: 8 });
  });

  it('reads dimensions in their order', () => {
    const options = readOptions('', 'hosts=2 gpus=4', true, true);
    expect(options).toEqual({ dims: { hosts: 2, gpus: 4 }, sync: true, keep: true });
    expect(Object.keys(options?.dims ?? {})).toEqual(['hosts', 'gpus']);
  });

  it.each(['', '0', '-1', '4 5', 'gpus=0', 'gpus=x', 'gpus=2 gpus=3', '2x'])('refuses %j', size => {
    expect(readOptions('m', size, false, false)).toBeNull();
  });

  it('writes the line for a kernel that cannot be asked', () => {
    expect(lineOf({ name: 'm', procs: 4 })).toBe('%mesh up m --procs 4');
    expect(lineOf({ dims: { hosts: 2, gpus: 4 }, keep: true, sync: true })).toBe(
      '%mesh up hosts=2 gpus=4 --keep --sync'
    );
  });
});
