import { FeedClient } from '../model';
import type { Kernel, KernelMessage as Messages } from '@jupyterlab/services';
import { KernelMessage } from '@jupyterlab/services';
import { Signal } from '@lumino/signaling';
import { ViewsComm } from './comm';

/**
 * What is known of a kernel: `waiting` until it answers, `foreign` if it does not run Python, `absent` without
 * monarch_kernel in it, `live`, or `gone` (it has ended, or starts again).
 */
export type LinkState = 'waiting' | 'foreign' | 'absent' | 'live' | 'gone';

/** The states of a kernel in which there is nothing to talk to. */
export const DOWN: readonly Kernel.Status[] = ['dead', 'terminating', 'restarting', 'autorestarting'];
/** A silent kernel is called anew at most so often (ms). */
const CALL_AGAIN = 30_000;

/**
 * What this page has of one kernel: a feed that is on while it is wanted, and that comes back after a restart.
 *
 * One link serves all documents of a kernel. `client` stays the same as long as the link: what is shown remains while
 * the kernel starts again.
 */
export class KernelLink {
  readonly client: FeedClient;
  readonly changed = new Signal<this, void>(this);
  private _state: LinkState = 'waiting';
  private _comm: ViewsComm | null = null;
  private _opening = false;
  private _period = 0;
  private _called = 0;
  /** A cell that names monarch_kernel has run: the next time that the kernel is idle, the target may be there. */
  private _mayHaveIt = false;
  private _disposed = false;

  constructor(private _kernel: Kernel.IKernelConnection) {
    this.client = new FeedClient(message => {
      if (!this._comm) {
        return;
      }
      this._comm.send(message.kind === 'lease' ? { ...message, period: this._period } : message);
    });
    this.client.onConnection(connection => {
      if (connection === 'gone' && this._comm && !DOWN.includes(this._kernel.status)) {
        this._callAgain();
      }
    });
    this._connect();
  }

  get state(): LinkState {
    return this._state;
  }

  get isDisposed(): boolean {
    return this._disposed;
  }

  get kernel(): Kernel.IKernelConnection {
    return this._kernel;
  }

  /** Wait until it is known what the kernel is. */
  async answered(): Promise<void> {
    while (this._state === 'waiting') {
      await new Promise<void>(resolve => {
        const changed = () => {
          this.changed.disconnect(changed);
          resolve();
        };
        this.changed.connect(changed);
      });
    }
  }

  /** Go on over another connection to the same kernel: the document of this one was closed. */
  use(kernel: Kernel.IKernelConnection): void {
    this._disconnect();
    this._kernel = kernel;
    this._comm?.move(kernel);
    this._connect();
    void this._open();
  }

  /** How often changes are wanted (s); 0: nobody looks. */
  want(period: number): void {
    if (period === this._period) {
      return;
    }
    const renew = this._period > 0 && period > 0;
    this._period = period;
    if (period > 0) {
      void this._open();
    }
    this.client.setVisible(period > 0 && this._comm !== null);
    if (renew) {
      this._lease();
    }
  }

  dispose(): void {
    if (this._disposed) {
      return;
    }
    this._disposed = true;
    this._disconnect();
    this.client.dispose();
    this._comm?.close();
    this._comm = null;
    Signal.clearData(this);
  }

  private _connect(): void {
    this._kernel.statusChanged.connect(this._statusChanged, this);
    this._kernel.iopubMessage.connect(this._heard, this);
  }

  private _disconnect(): void {
    this._kernel.statusChanged.disconnect(this._statusChanged, this);
    this._kernel.iopubMessage.disconnect(this._heard, this);
  }

  private _statusChanged(_: unknown, status: Kernel.Status): void {
    if (DOWN.includes(status)) {
      this._drop();
      this._become('gone');
    } else if (status === 'idle' || status === 'busy') {
      if (this._state === 'gone' || (status === 'idle' && this._mayHaveIt && this._state === 'absent')) {
        this._become('waiting');
        void this._open();
      }
    }
  }

  private _heard(_: unknown, message: Messages.IIOPubMessage): void {
    if (this._state === 'absent' && KernelMessage.isExecuteInputMsg(message)) {
      this._mayHaveIt ||= message.content.code.includes('monarch');
    }
  }

  private async _open(): Promise<void> {
    if (this._comm || this._opening || this._disposed || this._period === 0) {
      return;
    }
    if (this._state === 'absent' || this._state === 'foreign' || this._state === 'gone') {
      return;
    }
    this._opening = true;
    const kernel = this._kernel;
    this._mayHaveIt = false;
    try {
      let mine: ViewsComm | null = null;
      let closed = false;
      const comm = await ViewsComm.open(kernel, {
        message: message => {
          if (closed || (mine && mine !== this._comm)) {
            return;
          }
          this.client.receive(message);
          this._become('live');
        },
        closed: () => {
          closed = true;
          if (mine && mine === this._comm) {
            this._comm = null;
            this.client.setVisible(false);
            this.client.close();
            this._become('absent');
          }
        }
      });
      mine = comm;
      if (!comm) {
        this._become('foreign');
      } else if (this._disposed || kernel !== this._kernel || DOWN.includes(kernel.status)) {
        comm.close();
      } else if (closed) {
        this._become('absent');
      } else {
        this._comm = comm;
        this._called = Date.now();
        this.client.setVisible(false);
        this.client.setVisible(this._period > 0);
      }
    } catch {
      // The kernel has gone meanwhile; its status tells when it is there again.
    } finally {
      this._opening = false;
    }
    if (!this._disposed && kernel !== this._kernel) {
      void this._open();
    }
  }

  /** The kernel is silent though it runs: it may have started again unseen, and know nothing of the comm. */
  private _callAgain(): void {
    if (Date.now() - this._called < CALL_AGAIN) {
      return;
    }
    this._called = Date.now();
    this._comm?.close();
    this._drop();
    this._become('waiting');
    void this._open();
  }

  private _lease(): void {
    try {
      this._comm?.send({ kind: 'lease', period: this._period });
    } catch {
      // The kernel is dead, which its status says.
    }
  }

  private _drop(): void {
    this._comm?.abandon();
    this._comm = null;
    this.client.setVisible(false);
    this.client.close();
  }

  private _become(state: LinkState): void {
    if (state !== this._state && !this._disposed) {
      this._state = state;
      this.changed.emit();
    }
  }
}
