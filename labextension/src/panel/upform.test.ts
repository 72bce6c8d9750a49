import { describe, expect, it, vi } from 'vitest';
import { find, settled } from '../testing';
import type { Actions } from '../model';
import type { Surroundings } from './surroundings';
import { freeName, lineOf, readOptions, UpForm } from './upform';

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

  it('proposes a name that no mesh has, and asks what to do with one that has it', async () => {
    expect([freeName([]), freeName(['m', 'x']), freeName(['m', 'm2'])]).toEqual(['m', 'm2', 'm3']);
    const perform = vi.fn(async () => ({ text: 'up' }));
    const actions = { perform } as unknown as Actions;
    const form = new UpForm(document.body, actions, {} as Surroundings, '', () => ['m', 'other']);
    const name = find<HTMLInputElement>(form.node, '.mk-Up-name');
    const taken = find(form.node, '.mk-Up-taken');
    expect([name.value, taken.hidden]).toEqual(['m2', true]);
    name.value = 'other';
    name.dispatchEvent(new Event('input'));
    expect(taken.hidden).toBe(false);
    form.node.requestSubmit();
    await settled();
    expect(perform).toHaveBeenLastCalledWith('up', '', [], { options: { name: 'other', procs: 4, reuse: true } });
    taken.querySelectorAll('input')[1]?.click();
    form.node.requestSubmit();
    await settled();
    expect(perform).toHaveBeenLastCalledWith('up', '', [], { options: { name: 'other', procs: 4, replace: true } });
    name.value = 'm2';
    form.node.requestSubmit();
    await settled();
    expect(perform).toHaveBeenLastCalledWith('up', '', [], { options: { name: 'm2', procs: 4 } });
  });
});
