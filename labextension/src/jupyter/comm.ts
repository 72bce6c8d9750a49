import type { FrontEndMessage, KernelMessage as FeedMessage } from '../model';
import type { Kernel } from '@jupyterlab/services';
import { KernelMessage } from '@jupyterlab/services';
import { UUID } from '@lumino/coreutils';

/** The target of the comm that the kernel offers to this panel. */
const TARGET = 'monarch_kernel.views';

/** Told what comes through a comm. */
export interface CommListener {
  message(message: FeedMessage): void;
  /** The kernel has closed the comm, or has no such target. */
  closed(): void;
}

/**
 * A comm to the kernel's views, on a subshell of its own, so that it works while a cell runs.
 *
 * It speaks the protocol itself, instead of `createComm`, for two reasons. Of several connections to one kernel (one
 * kernel in two tabs) JupyterLab lets only one have comms, and that one may be closed first. And JupyterLab starts the
 * subshell without waiting for it, so that the message that opens the comm would queue behind a running cell.
 */
export class ViewsComm {
  private readonly _id = UUID.uuid4();
  private _closed = false;

  private constructor(
    private _kernel: Kernel.IKernelConnection,
    private readonly _subshell: string | null,
    private readonly _listener: CommListener
  ) {}

  /** Open a comm. Rejects if the kernel goes meanwhile. */
  static async open(kernel: Kernel.IKernelConnection, listener: CommListener): Promise<ViewsComm> {
    await kernel.info;
    let subshell: string | null = null;
    if (kernel.supportsSubshells) {
      const reply = await kernel.requestCreateSubshell({}).done;
      subshell = reply.content.subshell_id ?? null; // an error has none
    }
    const comm = new ViewsComm(kernel, subshell, listener);
    kernel.iopubMessage.connect(comm._receive, comm);
    comm._post('comm_open', { comm_id: comm._id, target_name: TARGET, data: {} });
    return comm;
  }

  /** Send a message; throws if the kernel is dead. */
  send(message: FrontEndMessage): void {
    if (this._closed) {
      throw new Error('The comm is closed.');
    }
    this._post('comm_msg', { comm_id: this._id, data: message as never });
  }

  /** Go on over another connection to the same kernel. */
  move(kernel: Kernel.IKernelConnection): void {
    this._kernel.iopubMessage.disconnect(this._receive, this);
    this._kernel = kernel;
    kernel.iopubMessage.connect(this._receive, this);
  }

  /** Forget the comm: the kernel that had it has ended. */
  abandon(): void {
    this._closed = true;
    this._kernel.iopubMessage.disconnect(this._receive, this);
  }

  /** Close the comm, and end its subshell, if the kernel is there to do so. */
  close(): void {
    if (this._closed) {
      return;
    }
    try {
      this._post('comm_close', { comm_id: this._id, data: {} });
    } catch {
      // A kernel that is dead has closed it.
    }
    this._end();
  }

  private _post(type: 'comm_open' | 'comm_msg' | 'comm_close', content: object): void {
    const message = KernelMessage.createMessage({
      msgType: type as 'comm_msg',
      channel: 'shell',
      username: this._kernel.username,
      session: this._kernel.clientId,
      subshellId: this._subshell,
      content: content as KernelMessage.ICommMsgMsg['content']
    });
    this._kernel.sendShellMessage(message, false, true);
  }

  private _receive(_: unknown, message: KernelMessage.IIOPubMessage): void {
    if (KernelMessage.isCommMsgMsg(message) && message.content.comm_id === this._id) {
      this._listener.message(message.content.data as unknown as FeedMessage);
    } else if (KernelMessage.isCommCloseMsg(message) && message.content.comm_id === this._id) {
      this._end();
      this._listener.closed();
    }
  }

  private _end(): void {
    this.abandon();
    if (this._subshell !== null && !this._kernel.isDisposed && this._kernel.status !== 'dead') {
      try {
        void this._kernel.requestDeleteSubshell({ subshell_id: this._subshell }).done.catch(() => undefined);
      } catch {
        // As above.
      }
    }
  }
}
