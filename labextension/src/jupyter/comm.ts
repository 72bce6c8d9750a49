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

  /** Open a comm; null if the kernel does not run Python. Rejects if the kernel goes meanwhile. */
  static async open(kernel: Kernel.IKernelConnection, listener: CommListener): Promise<ViewsComm | null> {
    let language = 'python'; // until the kernel says so
    void kernel.info.then(
      info => (language = info.language_info.name),
      () => undefined
    );
    await connected(kernel);
    await Promise.race([kernel.info, new Promise(resolve => setTimeout(resolve, INFO_WITHIN))]);
    const subshell = language === 'python' ? await createSubshell(kernel) : null;
    if (language !== 'python') {
      return null;
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
    // Nothing waits for the kernel's being idle again, which it does not say of these messages.
    this._kernel.sendShellMessage(message, false, true).dispose();
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

/** How long a kernel may take to say what it can do before it is taken for busy (ms). */
const INFO_WITHIN = 400;

/**
 * Start a subshell; null if the kernel has none.
 *
 * A kernel that runs a cell says what it can do only after the cell: as when the page was reloaded meanwhile. It is
 * then asked for a subshell all the same, on the control channel, where it answers at once if it knows them.
 */
async function createSubshell(kernel: Kernel.IKernelConnection): Promise<string | null> {
  const request = KernelMessage.createMessage<KernelMessage.ICreateSubshellRequestMsg>({
    msgType: 'create_subshell_request',
    channel: 'control',
    username: kernel.username,
    session: kernel.clientId,
    content: {}
  });
  const future = kernel.sendControlMessage(request, true, true);
  const reply = new Promise<string | null>(resolve => {
    future.onReply = message => {
      resolve((message.content as { subshell_id?: string }).subshell_id ?? null); // an error has none
    };
  });
  const found = await Promise.race([reply, kernel.info.then(() => (kernel.supportsSubshells ? reply : null))]);
  future.dispose();
  return found;
}

/** Wait until messages to the kernel are sent at once, and not kept until it says what it can do. */
function connected(kernel: Kernel.IKernelConnection): Promise<void> {
  return new Promise(resolve => {
    const look = () => {
      if (kernel.connectionStatus === 'connected' || kernel.isDisposed) {
        kernel.connectionStatusChanged.disconnect(look);
        resolve();
      }
    };
    kernel.connectionStatusChanged.connect(look);
    look();
  });
}
