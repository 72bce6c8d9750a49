import { Signal } from '@lumino/signaling';
import type { Kernel, KernelMessage } from '@jupyterlab/services';
import { describe, expect, it, vi } from 'vitest';
import { KernelLink } from './link';
import { MeshStore } from '../model';
import { NewFailures } from '../panel/newfailures';
import { worstMesh } from '../panel/worstmesh';

/** A kernel as a link sees it: what it is sent is recorded, and the test says what it answers. */
class ScriptedKernel {
  readonly id = 'k';
  readonly clientId = 'client';
  readonly username = '';
  readonly supportsSubshells = true;
  readonly isDisposed = false;
  status: Kernel.Status = 'idle';
  readonly statusChanged = new Signal<this, Kernel.Status>(this);
  readonly iopubMessage = new Signal<this, KernelMessage.IIOPubMessage>(this);
  readonly sent: { type: string; subshell: unknown; content: Record<string, never> }[] = [];
  readonly deleted: string[] = [];
  language = 'python';
  private _subshells = 0;

  get info() {
    return this.isBusy ? new Promise(() => undefined) : Promise.resolve({ language_info: { name: this.language } });
  }

  sendControlMessage() {
    const future = { onReply: (_: object) => undefined, dispose: () => undefined };
    const content = { status: 'ok', subshell_id: `s${this._subshells++}` };
    void Promise.resolve().then(() => future.onReply({ content }));
    return future;
  }

  requestDeleteSubshell({ subshell_id }: { subshell_id: string }) {
    this.deleted.push(subshell_id);
    return { done: Promise.resolve() };
  }

  readonly connectionStatus = 'connected';
  readonly connectionStatusChanged = new Signal<this, string>(this);
  /** Whether a cell runs, so that the kernel says what it is only later. */
  isBusy = false;

  sendShellMessage({ header, content }: { header: { msg_type: string; subshell_id: unknown }; content: never }) {
    this.sent.push({ type: header.msg_type, subshell: header.subshell_id, content });
    return { dispose: () => undefined };
  }

  become(status: Kernel.Status) {
    this.status = status;
    this.statusChanged.emit(status);
  }

  tell(type: string, content: object) {
    const message = { channel: 'iopub', header: { msg_type: type }, parent_header: {}, metadata: {}, content };
    this.iopubMessage.emit(message as never);
  }

  /** The identifier of the comm that was opened last. */
  get comm(): string {
    return String(this.sent.filter(each => each.type === 'comm_open').at(-1)?.content['comm_id']);
  }

  get leases(): number[] {
    return this.sent
      .map(each => (each.content as { data?: { kind?: string; period?: number } }).data)
      .flatMap(data => (data?.kind === 'lease' ? [data.period ?? -1] : []));
  }

  answers(version = 1) {
    const data = { kind: 'snapshot', version, time: 0, meshes: [], hosts: [], ranks: {}, failures: [] };
    this.tell('comm_msg', { comm_id: this.comm, data });
  }
}

async function settled() {
  for (let turn = 0; turn < 30; turn++) {
    await Promise.resolve();
  }
}

async function linkTo(kernel: ScriptedKernel, period = 0.2) {
  const link = new KernelLink(kernel as unknown as Kernel.IKernelConnection);
  link.want(period);
  await settled();
  return link;
}

describe('a link to a kernel', () => {
  it('opens a comm on a subshell of its own, leases, and is live when the kernel answers', async () => {
    const kernel = new ScriptedKernel();
    const link = await linkTo(kernel, 2);
    expect(kernel.sent[0]).toMatchObject({
      type: 'comm_open',
      subshell: 's0',
      content: { target_name: 'monarch_kernel.views' }
    });
    expect(kernel.leases).toEqual([2]);
    expect(link.state).toBe('waiting');
    const answered = vi.fn();
    void link.answered().then(answered);
    await settled();
    expect(answered).not.toHaveBeenCalled();
    kernel.answers();
    expect(link.state).toBe('live');
    await settled();
    expect(answered).toHaveBeenCalledTimes(1);
    link.want(0.2);
    expect(kernel.leases).toEqual([2, 0.2]);
    link.dispose();
    expect(kernel.sent.at(-1)?.type).toBe('comm_close');
    expect(kernel.deleted).toEqual(['s0']);
  });

  it('opens nothing while nobody looks, nor in a kernel of another language', async () => {
    const quiet = new ScriptedKernel();
    await linkTo(quiet, 0);
    expect(quiet.sent).toEqual([]);
    const foreign = new ScriptedKernel();
    foreign.language = 'R';
    const link = await linkTo(foreign);
    expect(foreign.sent).toEqual([]);
    expect(link.state).toBe('foreign');
  });

  it('opens while a cell runs, which keeps the kernel from saying what it is', async () => {
    vi.useFakeTimers();
    const kernel = new ScriptedKernel();
    kernel.isBusy = true;
    await linkTo(kernel);
    await vi.advanceTimersByTimeAsync(500);
    vi.useRealTimers();
    expect(kernel.sent[0]).toMatchObject({ type: 'comm_open', subshell: 's0' });
  });

  it('tries again only when a cell that may have loaded the kernel side has run', async () => {
    const kernel = new ScriptedKernel();
    const link = await linkTo(kernel);
    kernel.tell('comm_close', { comm_id: kernel.comm, data: {} });
    expect(link.state).toBe('absent');
    kernel.become('busy');
    kernel.tell('execute_input', { code: '1 + 1', execution_count: 1 });
    kernel.become('idle');
    await settled();
    expect(kernel.sent.filter(each => each.type === 'comm_open')).toHaveLength(1);
    kernel.become('busy');
    kernel.tell('execute_input', { code: '%load_ext monarch_kernel', execution_count: 2 });
    kernel.become('idle');
    await settled();
    expect(kernel.sent.filter(each => each.type === 'comm_open')).toHaveLength(2);
    kernel.answers();
    expect(link.state).toBe('live');
  });

  it('comes back after a restart with the same client, and does not talk to the kernel meanwhile', async () => {
    const kernel = new ScriptedKernel();
    const link = await linkTo(kernel);
    kernel.answers(7);
    const before = kernel.sent.length;
    const heard = vi.fn();
    link.client.follow('m', [], '', heard);
    kernel.become('restarting');
    expect(link.state).toBe('gone');
    expect(link.client.store.version).toBe(7);
    expect(kernel.sent.length).toBe(before + 1); // the follow
    kernel.become('idle');
    await settled();
    expect(kernel.sent.filter(each => each.type === 'comm_open')).toHaveLength(2);
    kernel.answers(1);
    expect(link.state).toBe('live');
    expect(link.client.store.version).toBe(1);
    expect(kernel.sent.at(-1)?.content).toMatchObject({ data: { kind: 'follow' } });
  });

  it('goes on over another connection when the document of the first is closed', async () => {
    const first = new ScriptedKernel();
    const link = await linkTo(first);
    first.answers();
    const second = new ScriptedKernel();
    link.use(second as unknown as Kernel.IKernelConnection);
    link.want(2);
    expect(second.leases).toEqual([2]);
    expect(second.sent[0]?.content).toMatchObject({ comm_id: first.comm });
  });
});

describe('notices', () => {
  const failure = (number: number, kind = 'death') => ({ number, time: 0, mesh: 'k', ranks: [0], kind, text: 'x' });
  const snapshot = (version: number, failures: object[]) =>
    ({ kind: 'snapshot', version, time: 0, meshes: [], hosts: [], ranks: {}, failures }) as never;

  it('tell of what came since, and of nothing that was there at first', () => {
    const store = new MeshStore();
    const failures = new NewFailures(store);
    store.apply(snapshot(1, [failure(1), failure(2)]));
    expect(failures.take()).toEqual([]);
    store.apply(snapshot(2, [failure(1), failure(2), failure(3), failure(4, 'error'), failure(5, 'hang')]));
    expect(failures.take().map(each => each.number)).toEqual([3, 5]);
    expect(failures.take()).toEqual([]);
    store.apply(snapshot(1, [failure(1)])); // a kernel that has started again
    expect(failures.take().map(each => each.number)).toEqual([1]);
  });
});

describe('the status bar', () => {
  it('names the mesh with the worst news', () => {
    const store = new MeshStore();
    store.apply({
      kind: 'snapshot',
      version: 1,
      time: 0,
      meshes: [
        { key: 'a', name: 'a', current: true },
        { key: 'b', name: 'b' }
      ],
      hosts: [],
      ranks: {
        a: [{ mesh: 'a', rank: 0, state: 'running' }],
        b: [
          { mesh: 'b', rank: 0, state: 'dead' },
          { mesh: 'b', rank: 1, state: 'idle' }
        ]
      },
      failures: []
    });
    expect(worstMesh(store)).toMatchObject({ name: 'b', state: 'dead', news: '1 dead', text: '2 ranks · 1 dead' });
  });
});
