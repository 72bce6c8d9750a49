var S=["dead","unresponsive","stopped","healing","starting","running","idle","ended"],vt={index:0,name:"",use:0,memory_used:0,memory_total:0},bt={name:"",cls:"",endpoint:"",since:0,waiting:0,calls:0,failures:0},wt={reason:"",file:"",line:0,function:"",text:""},yt={key:"",name:"",cores:0,cpu:0,memory_used:0,memory_total:0,gpus:[],tree:"",environment:"",gone:"",ends_at:0,then:""},xt={key:"",engine:"",mesh:"",hosts:0,up:0,reason:"",since:0,expected_start:0,ends_at:0,ended:!1,used_by:"",error:""},Mt={key:"",name:"",labels:[],sizes:[],hosts:[],current:!1,kept:"",hang:"",created:0},Tt={mesh:"",rank:0,host:"",proc:"",pid:0,state:"starting",since:0,cause:"",doing:"",doing_since:0,waiting:0,calls:0,failures:0,sent:0,received:0,rss:0,cpu:0,gpu_memory:{},started:0,stop:null,older:!1,actors:[]};function we(o){return{...yt,...o,gpus:(o.gpus??[]).map(e=>({...vt,...e}))}}function ye(o){return{...xt,...o}}function xe(o){return{...Mt,...o}}function Me(o,e=Tt){let t={...e,...o};return o.stop&&(t.stop={...wt,...o.stop}),o.actors&&(t.actors=o.actors.map(i=>({...bt,...i}))),t}var Ue=200,ie=class{version=-1;meshes=new Map;hosts=new Map;failures=[];jobs=new Map;_ranks=new Map;_listeners=new Set;_clockAhead=0;ranks(e){return this._ranks.get(e)??[]}rank(e,t){return this._ranks.get(e)?.[t]}hostName(e){return this.hosts.get(e)?.name||e}now(){return Date.now()/1e3+this._clockAhead}setClock(e){this._clockAhead=e-Date.now()/1e3}subscribe(e){return this._listeners.add(e),()=>{this._listeners.delete(e)}}apply(e){return e.kind==="snapshot"?(this._tell(this._replace(e)),!0):this.version<0||e.base>this.version?!1:(e.version>this.version&&this._tell(this._merge(e)),!0)}_tell(e){for(let t of[...this._listeners])t(e)}_replace(e){this.meshes=new Map(e.meshes.map(i=>[i.key??"",xe(i)])),this.hosts=new Map(e.hosts.map(i=>[i.key??"",we(i)])),this._ranks=new Map(Object.entries(e.ranks).map(([i,s])=>[i,s.map(n=>Me(n))])),this.failures=e.failures.slice(-Ue),this.jobs=new Map((e.jobs??[]).map(i=>[i.key??"",ye(i)])),this.version=e.version;let t=[...this._ranks].map(([i,s])=>[i,new Set(s.keys())]);return{structure:!0,ranks:new Map(t),failures:!0}}_merge(e){let t=!1;if(e.meshes?.length||e.gone?.meshes?.length){let n=new Map(this.meshes);for(let r of e.meshes??[])n.set(r.key??"",xe(r));for(let r of e.gone?.meshes??[])n.delete(r),this._ranks.delete(r);this.meshes=n,t=!0}if(e.hosts?.length||e.gone?.hosts?.length){let n=new Map(this.hosts);for(let r of e.hosts??[]){let a=we(r),d=n.get(a.key);t||=d?.name!==a.name||d.gone!==a.gone,n.set(a.key,a)}for(let r of e.gone?.hosts??[])t=n.delete(r)||t;this.hosts=n}if(e.jobs?.length||e.gone?.jobs?.length){let n=new Map(this.jobs);for(let r of e.jobs??[])n.set(r.key??"",ye(r));for(let r of e.gone?.jobs??[])n.delete(r);this.jobs=n}let i=new Map;for(let[n,r]of Object.entries(e.ranks??{})){let a=this._ranks.get(n)??[];this._ranks.set(n,a);let d=new Set;for(let[m,c]of Object.entries(r)){let u=Number(m),k=a[u];t||=k===void 0||c.host!==void 0&&c.host!==k.host,a[u]=Me(k?c:{mesh:n,rank:u,...c},k),d.add(u)}i.set(n,d)}let s=e.failures??[];return s.length&&(this.failures=[...this.failures,...s].slice(-Ue)),this.version=e.version,{structure:t,ranks:i,failures:s.length>0}}};function Ke(o,e){return o.replace(/%(\d)/g,(t,i)=>{let s=e[Number(i)-1];return s===void 0?t:String(s)})}var Ct={__:(o,...e)=>Ke(o,e),_n:(o,e,t,...i)=>Ke(t===1?o:e,[t,...i])},Je=Ct;function l(o,...e){return Je.__(o,...e)}function x(o,e,t,...i){return Je._n(o,e,t,...i)}var St=3e3,Ye=1e4,Lt=2e3,Et=12e4,Rt=9e5,se=class extends Error{hint;constructor({message:e,hint:t}){super(e),this.name="RequestError",this.hint=t??""}},Vt=0,ne=class{constructor(e,t=.2){this._send=e;this._period=t}_send;_period;store=new ie;_connection="waiting";_visible=!1;_disposed=!1;_timer;_heard=0;_hidden=0;_askedAgain=-1/0;_number=0;_prefix=`${Date.now().toString(36)}${Math.random().toString(36).slice(2,8)}.${Vt++}`;_pending=new Map;_streams=new Map;_connectionListeners=new Set;_noticeListeners=new Set;get connection(){return this._connection}onConnection(e){return this._connectionListeners.add(e),()=>this._connectionListeners.delete(e)}onNotice(e){return this._noticeListeners.add(e),()=>this._noticeListeners.delete(e)}setVisible(e){if(e===this._visible||this._disposed)return;this._visible=e,clearInterval(this._timer);let t=Date.now();if(!e){this._hidden=t;return}let i=this._hidden>0&&t-this._hidden>=Ye;this._heard=t,this._timer=setInterval(()=>this._renew(),St),this._post({kind:"lease",period:this._period}),i&&this._resume()}receive(e){if(this._disposed)return;this._heard=Date.now();let t=this._connection==="gone";switch(e.kind){case"snapshot":this._askedAgain=-1/0,this.store.apply(e);break;case"changes":this.store.apply(e)||this._again();break;case"alive":this.store.setClock(e.time),e.version>this.store.version&&this._again();break;case"answer":e.error&&this._streams.get(e.id)?.failed?.(new se(e.error)),this._settle(e.id,e.error??null,e.value);break;case"log":case"points":this._streams.get(e.id)?.heard(e);break;case"notice":this._noticeListeners.forEach(i=>i(e));break;default:return}this._become("live"),t&&this._resume()}close(){this._become("gone")}ask(e,t,i,s={}){let n={...s,kind:"ask",id:this._id(),what:e,mesh:t,ranks:i};return this._request(n,Et)}perform(e,t,i,s={}){let n={...s,kind:"do",id:this._id(),what:e,mesh:t,ranks:i};return this._request(n,Rt)}follow(e,t,i,s,n){let r=this._id(),a={kind:"follow",id:r,mesh:e,ranks:t,search:i};return this._stream(r,{begin:a,end:{kind:"unfollow",id:r},heard:s,failed:n})}plot({mesh:e,ranks:t=[],expression:i,period:s},n,r){let a=this._id(),d={kind:"plot",id:a,mesh:e,ranks:t,expression:i,period:s};return this._stream(a,{begin:d,end:{kind:"unplot",id:a},heard:n,failed:r})}dispose(){if(!this._disposed){for(let e of this._streams.values())this._post(e.end);this._streams.clear(),this._disposed=!0,clearInterval(this._timer),this._rejectAll(),this._connectionListeners.clear(),this._noticeListeners.clear()}}_id(){return`${this._prefix}.${this._number++}`}_renew(){Date.now()-this._heard>=Ye&&this._become("gone"),this._post({kind:"lease",period:this._period})}_again(){Date.now()-this._askedAgain>=Lt&&(this._askedAgain=Date.now(),this._post({kind:"again"}))}_post(e){if(!this._disposed)try{this._send(e)}catch{this._become("gone")}}_resume(){for(let e of this._streams.values())this._post(e.begin)}_become(e){e!==this._connection&&(this._connection=e,e==="gone"&&this._rejectAll(),this._connectionListeners.forEach(t=>t(e)))}_request(e,t){return new Promise((i,s)=>{let n={message:l("The kernel has not answered for %1 s.",t/1e3)},r=setTimeout(()=>this._settle(e.id,n),t);this._pending.set(e.id,{resolve:i,reject:s,timer:r}),this._post(e),(this._connection==="gone"||this._disposed)&&this._rejectAll()})}_settle(e,t,i){let s=this._pending.get(e);s&&(this._pending.delete(e),clearTimeout(s.timer),t?s.reject(new se(t)):s.resolve(i))}_rejectAll(){for(let e of[...this._pending.keys()])this._settle(e,{message:l("The kernel has gone.")})}_stream(e,t){return this._streams.set(e,t),this._post(t.begin),()=>{this._streams.delete(e)&&this._post(t.end)}}};var Nt=/\u001b\[[0-9;?]*[ -/]*[@-~]|\u001b\][^\u0007]*\u0007|[\u0000-\u0008\u000b-\u001f]/g,oe=class{constructor(e=1e5){this.limit=e}limit;_lines=[];_shown=this._lines;_filter={search:"",ranks:null};get length(){return this._shown.length}get total(){return this._lines.length}line(e){return this._shown[e]}append(e){let t=this._shown!==this._lines;for(let[n,r,a]of e){let d=[n,r,a.replace(Nt,"")];this._lines.push(d),t&&this._passes(d)&&this._shown.push(d)}if(this._lines.length<=this.limit)return 0;let i=this._lines.length-Math.floor(this.limit*.9),s=t?this._lines.slice(0,i).filter(n=>this._passes(n)).length:i;return this._lines.splice(0,i),t&&this._shown.splice(0,s),s}filter(e){this._filter={...e,search:e.search.toLowerCase()};let t=!e.search&&!e.ranks;this._shown=t?this._lines:this._lines.filter(i=>this._passes(i))}text(){let e=new Set(this._shown.map(([t])=>t)).size>1;return this._shown.map(([t,,i])=>e&&t>=0?`[${t}] ${i}
`:`${i}
`).join("")}clear(){let e=this._shown!==this._lines;this._lines=[],this._shown=e?[]:this._lines}_passes([e,,t]){let{search:i,ranks:s}=this._filter;return(!s||s.has(e))&&(!i||t.toLowerCase().includes(i))}};function A(o){if(o>0&&o<.1)return l("%1 ms",Math.max(1,Math.round(o*1e3)));if(o<10)return l("%1 s",o.toFixed(1));let e=Math.trunc(o);return e<60?l("%1 s",e):e<3600?l("%1 min %2 s",Math.floor(e/60),e%60):l("%1 h %2 min",Math.floor(e/3600),Math.floor(e%3600/60))}function L(o){let e=Math.max(0,Math.trunc(o));return e<10?l("%1 s",e):A(e)}function Te(o){return new Date(o*1e3).toTimeString().slice(0,8)}function D(o){return o>=1e9?l("%1 GB",(o/1e9).toFixed(1)):l("%1 MB",Math.round(o/1e6))}function Ce(o){return o<1e3?x("%1 byte","%1 bytes",o):o<1e6?l("%1 kB",Math.round(o/1e3)):o<1e9?l("%1 MB",(o/1e6).toFixed(1)):l("%1 GB",(o/1e9).toFixed(1))}function V(o){if(o===0)return"0";let e=Math.abs(o);return e>=1e6||e<1e-4?o.toExponential(2).replace(/\.?0+e/,"e"):String(Number(o.toPrecision(4)))}function Qe(o){let e=[...new Set(o)].sort((i,s)=>i-s),t=[];for(let i of e){let s=t.at(-1);s&&i===s[1]+1?s[1]=i:t.push([i,i])}return t.map(([i,s])=>i===s?`${i}`:`${i}${s===i+1?", ":"-"}${s}`).join(", ")}function Xe(o){let e=new Set;for(let t of o.split(/[\s,]+/).filter(Boolean)){let i=/^(\d{1,6})(?:[-:](\d{1,6}))?$/.exec(t);if(!i)return null;let s=Number(i[1]),n=Number(i[2]??i[1]);if(n<s)return null;for(let r=s;r<=n;r++)e.add(r)}return[...e].sort((t,i)=>t-i)}var re=class{constructor(e=1200){this._limit=e}_limit;times=[];values=new Map;spreads=[];_last=[];_standing=new Map;get ranks(){return[...this.values.keys()].sort((e,t)=>e-t)}get isBand(){return this.values.size>64}push(e,t){if(e<=(this.times.at(-1)??-1/0))return;let i=this.times.push(e);for(let[n,r]of t){let a=this.values.get(n);a||(a=new Array(i-1).fill(NaN),this.values.set(n,a)),a[i-1]=r??NaN}for(let n of this.values.values())n.length<i&&n.push(NaN);this._last=t;let s=new Map;for(let{rank:n}of Ze(t))s.set(n,(this._standing.get(n)??0)+1);if(this._standing=s,this.spreads.push(Le(t)),i>this._limit){let n=Math.ceil(this._limit/10);this.times.splice(0,n),this.spreads.splice(0,n),this.values.forEach(r=>r.splice(0,n))}}outliers(){let e=Math.min(3,this.times.length);return Ze(this._last).filter(({rank:t})=>(this._standing.get(t)??0)>=e).slice(0,6)}};function Ze(o){let e=o.filter(([,d])=>!Se(d)).map(([d])=>({rank:d,value:null})),{middle:t}=Le(o),i=o.flatMap(([d,m])=>Se(m)?[{rank:d,value:m,gap:Math.abs(m-t)}]:[]),{middle:s}=Le(i.map(({rank:d,gap:m})=>[d,m])),n=Math.max(6*s,Math.abs(t)*1e-9),r=o.length<4?[]:i.filter(({gap:d})=>d>n),a=(e.length+r.length)*4<=o.length?r:[];return[...e,...a.sort((d,m)=>m.gap-d.gap).map(({rank:d,value:m})=>({rank:d,value:m}))]}function Se(o){return o!==null&&Number.isFinite(o)}function Le(o){let e=o.flatMap(([,s])=>Se(s)?[s]:[]).sort((s,n)=>s-n),t=e.length/2,i=((e[Math.ceil(t)-1]??NaN)+(e[Math.floor(t)]??NaN))/2;return{low:e[0]??NaN,middle:i,high:e.at(-1)??NaN}}function Ee(o,e,t){let i=e-o;if(!(i>0)||t<1)return Number.isFinite(o)?[o]:[];let s=i/t,n=10**Math.floor(Math.log10(s)),r=n*([1,2,5,10].find(d=>d*n>=s)??10),a=[];for(let d=Math.ceil(o/r-1e-9);d*r<=e+r*1e-9;d++)a.push(Number((d*r).toPrecision(12)));return a}function Y(o){let e=Object.fromEntries(S.map(s=>[s,0])),t=0,i=0;for(let s of o)e[s.state]++,t++,i+=s.older?1:0;return{total:t,older:i,states:e}}function w(o){switch(o){case"dead":return l("dead");case"unresponsive":return l("unresponsive");case"stopped":return l("stopped");case"healing":return l("healing");case"starting":return l("starting");case"running":return l("running");case"idle":return l("idle");case"ended":return l("ended")}}function P(o){if(o.state!=="stopped"||!o.stop)return o.cause;let{reason:e,file:t,line:i,function:s,text:n}=o.stop,r=t?l("%1, line %2",t,i):s;return[e,r,n].filter(Boolean).join(" \xB7 ")}function et({state:o,doing:e}){return o==="running"||o==="unresponsive"||o==="stopped"||!!e&&!Bt(o)}function Bt(o){return o==="dead"||o==="ended"}var tt=["dead","unresponsive","stopped","healing"];function O(o){return tt.includes(o)}function Ve(o){let e=new Map;for(let t of o)if(O(t.state)){let i=P(t),s=`${t.state} ${i}`,n=e.get(s);n?n.members.push(t):e.set(s,{state:t.state,reason:i,members:[t]})}return[...e.values()].map(({state:t,reason:i,members:s})=>({state:t,reason:i,ranks:s.map(n=>n.rank),hosts:[...new Set(s.map(n=>n.host))],since:s.reduce((n,r)=>Math.min(n,r.since),1/0)})).sort((t,i)=>S.indexOf(t.state)-S.indexOf(i.state)||i.ranks.length-t.ranks.length)}function it(o,e,t){let i=(o?.hosts??[]).map(n=>e.get(n)).filter(n=>n!==void 0).filter(n=>n.ends_at>t&&!n.gone).sort((n,r)=>n.ends_at-r.ends_at),s=i[0];return s?{names:Ht(i.map(n=>n.name||n.key)),left:s.ends_at-t,then:s.then}:null}var Re=4;function Ht(o){let e=o.slice(0,Re).join(", ");return o.length>Re?l("%1 and %2 more",e,o.length-Re):e}function Ne({names:o,left:e}){return l("the walltime of %1 ends in %2",o,L(e))}function st(o,e,t=null){let i=x("%1 rank","%1 ranks",e.length),s=(m,c)=>({state:m,count:i,news:c,text:c?`${i} \xB7 ${c}`:i}),{states:n,total:r,older:a}=Y(e),d=tt.filter(m=>n[m]).map(m=>`${n[m]} ${w(m)}`);if(d.length){let m=Ve(e)[0],c=m&&m.reason&&d.length===1?`: ${m.reason}`:"";return s(m?m.state:"",d.join(" \xB7 ")+c)}if(o?.hang)return s("hang",o.hang);if(t)return s("walltime",Ne(t));for(let m of["starting","running"])if(n[m])return s(m,n[m]===r?l("all %1",w(m)):`${n[m]} ${w(m)}`);return r?a?s("idle",l("%1 with modules of an older tree",a)):s(n.idle?"idle":"ended",n.idle?l("idle"):l("ended")):s("","")}function nt(o){let e=new Map;for(let t of o){let i=e.get(t.host);i?i.push(t.rank):e.set(t.host,[t.rank])}return[...e].map(([t,i])=>({host:t,ranks:i}))}function Q(o,e){return o.doing?o.doing_since?`${o.doing} \xB7 ${A(Math.max(0,e-o.doing_since))}`:o.doing:""}function ae(o,e,t){let i=P(o);return[l("rank %1",o.rank),i?`${w(o.state)}: ${i}`:w(o.state),Q(o,t),o.waiting?x("%1 message waits","%1 messages wait",o.waiting):"",o.older?l("modules of an older tree"):"",o.rss?D(o.rss):"",e?l("on %1",e):""].filter(Boolean).join(", ")}function ot(o){let e=new Map;for(let t of o){let i=`${t.mesh} ${t.kind} ${t.text}`,s=e.get(i)??[];e.set(i,s),s.push(t)}return[...e.values()].flatMap(t=>{let i=t.at(-1),s=[...new Set(t.flatMap(n=>n.ranks))];return i?[{...i,ranks:s,count:t.length,last:i.time}]:[]}).sort((t,i)=>i.last-t.last)}function F(o){return o.length===1?l("rank %1",o[0]):l("ranks %1",Qe(o))}function h(o,e="",t={},...i){let s=document.createElement(o);e&&(s.className=e);for(let[n,r]of Object.entries(t))p(s,n,r);return s.append(...i),s}function g(o,e,t,i={}){let s=h("button",o,{type:"button",...i},e);return s.addEventListener("click",t),s}function p(o,e,t){let i=t===!1||t===void 0?null:t===!0?"":String(t);o.getAttribute(e)!==i&&(i===null?o.removeAttribute(e):o.setAttribute(e,i))}function f(o,e){o.textContent!==e&&(o.textContent=e)}function T(o,e){f(o,e),p(o,"title",e||void 0)}var N=class{constructor(e){this._run=e}_run;_frame=0;request(){this._frame||=requestAnimationFrame(()=>{this._frame=0,this._run()})}cancel(){cancelAnimationFrame(this._frame),this._frame=0}},y=class{_list=[];add(...e){this._list.push(...e)}listen(e,t,i,s){let n=i;e.addEventListener(t,n,s),this._list.push(()=>e.removeEventListener(t,n,s))}dispose(){for(let e of this._list.reverse())e();this._list=[]}};function $(o,e){if(typeof ResizeObserver>"u")return()=>{};let t=new ResizeObserver(e);return t.observe(o),()=>t.disconnect()}function z(o,e,t){let i=s=>{for(let n of e())n.tabIndex=n===s?0:-1};t.listen(o,"focusin",s=>{let n=e().find(r=>r===s.target);n&&i(n)}),t.listen(o,"keydown",s=>{let n=e(),r=n.indexOf(s.target);if(!n[r])return;let d=At(s.key,r,n);d&&(s.preventDefault(),s.stopPropagation(),d.focus())})}function At(o,e,t){let i=t[e];if(!i)return;let s=i.getBoundingClientRect(),n=r=>{let a=s.left+s.width/2,d=r.map(c=>({item:c,box:c.getBoundingClientRect()})),m=d[0]?.box.top;return d.filter(({box:c})=>Math.abs(c.top-(m??0))<2).map(({item:c,box:u})=>({item:c,far:Math.abs(u.left+u.width/2-a)})).sort((c,u)=>c.far-u.far)[0]?.item};switch(o){case"ArrowRight":return t[e+1];case"ArrowLeft":return t[e-1];case"ArrowDown":return n(t.slice(e+1).filter(r=>r.getBoundingClientRect().top>s.top+1));case"ArrowUp":return n(t.slice(0,e).reverse().filter(r=>r.getBoundingClientRect().top<s.top-1));case"Home":return t[0];case"End":return t.at(-1);default:return}}var He={dead:{box:"solid",path:"M4.2 5.6 5.6 4.2 8 6.6l2.4-2.4 1.4 1.4L9.4 8l2.4 2.4-1.4 1.4L8 9.4l-2.4 2.4-1.4-1.4L6.6 8z"},unresponsive:{box:"solid",path:"M6.9 3h2.2v6.2H6.9zM6.9 10.6h2.2v2.3H6.9z"},stopped:{box:"solid",path:"M4.6 3.8h2.4v8.4H4.6zM9 3.8h2.4v8.4H9z"},healing:{box:"solid",path:"M6.9 3.5h2.2v3.4h3.4v2.2H9.1v3.4H6.9V9.1H3.5V6.9h3.4z"},starting:{box:"dotted",path:"M8 4.5A3.5 3.5 0 1 0 11.5 8H9.9A1.9 1.9 0 1 1 8 6.1z"},running:{box:"tint",path:"M5.8 4v8L12 8z"},idle:{box:"outline",path:""},ended:{box:"none",path:"M4 7.2h8v1.6H4z"}},Ae="M9 0h7v7z",Be="http://www.w3.org/2000/svg";function rt(o,e){let t=document.createElementNS(Be,"path");return t.setAttribute("d",o),t.setAttribute("class",e),t}function C(o,e=!1){let t=document.createElementNS(Be,"svg");t.setAttribute("viewBox","0 0 16 16"),t.setAttribute("aria-hidden","true"),t.setAttribute("class","mk-Icon"),t.setAttribute("data-state",o);let{box:i,path:s}=He[o];if(i!=="none"){let n=document.createElementNS(Be,"rect"),r=i==="solid"?0:1;n.setAttribute("x",String(r)),n.setAttribute("y",String(r)),n.setAttribute("width",String(16-2*r)),n.setAttribute("height",String(16-2*r)),n.setAttribute("rx","3"),n.setAttribute("class",`mk-Icon-box mk-mod-${i}`),t.append(n)}return s&&t.append(rt(s,i==="solid"?"mk-Icon-on":"mk-Icon-mark")),e&&t.append(rt(Ae,"mk-Icon-older")),t}var Dt=8,B=class{constructor(e,t){this._root=e;this._changed=t;this._look();let i=()=>this._look();if(typeof MutationObserver<"u"){let s=new MutationObserver(i);for(let n of[document.documentElement,document.body])s.observe(n,{attributeFilter:["class","style","data-theme","data-jp-theme-name","data-vscode-theme-kind"]});this._disposables.add(()=>s.disconnect())}if(typeof matchMedia<"u")for(let s of["(prefers-color-scheme: dark)","(prefers-contrast: more)","(forced-colors: active)"])this._disposables.listen(matchMedia(s),"change",i)}_root;_changed;_palette;_disposables=new y;get palette(){return this._palette??=It(this._root),this._palette}refresh(){this._look()}dispose(){this._disposables.dispose()}_look(){this._root.dataset.mkTheme=Ot(this._root)?"dark":"light",this._palette=void 0,this._changed()}};function Ot(o){for(let e=o.parentElement;e;e=e.parentElement){let t=getComputedStyle(e).backgroundColor.match(/[\d.]+/g)?.map(Number)??[],[i=0,s=0,n=0,r=1]=t;if(t.length>=3&&r>.5)return .2126*i+.7152*s+.0722*n<128}return typeof matchMedia<"u"&&matchMedia("(prefers-color-scheme: dark)").matches}function It(o){let e=getComputedStyle(o),t=i=>e.getPropertyValue(`--mk-${i}`).trim()||"#888";return{states:Object.fromEntries(S.map(i=>[i,t(i)])),on:t("on"),text:t("text"),faint:t("faint"),line:t("line"),track:t("track"),surface:t("surface"),lines:Array.from({length:Dt},(i,s)=>t(`line-${s+1}`)),font:e.fontFamily||"sans-serif"}}var q=18,at=10,Pt=1e3;function Ft(o,e){let t=URL.createObjectURL(new Blob([e],{type:"text/plain;charset=utf-8"}));h("a","",{href:t,download:o}).click(),URL.revokeObjectURL(t)}var le=class{node=h("div","mk-View mk-Log");buffer;_search;_ranks;_follow;_count=h("span","mk-Log-count");_scroll=h("div","mk-Log-scroll",{tabindex:0,role:"log","aria-live":"off"});_space=h("div","mk-Log-space");_lines=[];_disposables=new y;_frame=new N(()=>this._draw());_theme;_following=!0;_disposed=!1;constructor(e,t,i){this.buffer=new oe(i.limit),this._search=h("input","mk-Input",{type:"search",placeholder:l("Search")}),this._search.setAttribute("aria-label",l("Search in the log")),this._ranks=h("input","mk-Input mk-Log-ranks",{placeholder:l("Ranks")}),this._ranks.setAttribute("aria-label",l("Only of these ranks, as 0-3, 7")),this._ranks.hidden=i.ranks?.length===1,this._follow=g("mk-Button",l("Follow"),()=>this._setFollowing(!this._following));let s=g("mk-Button",l("Clear"),()=>{this.buffer.clear(),this._changed()});s.hidden=this._ranks.hidden;let n=g("mk-Button",l("Save"),()=>Ft(`${i.mesh}.log`,this.buffer.text()),{title:l("Save the lines that are shown here in a file")});this._scroll.setAttribute("aria-label",l("Log")),this._scroll.append(this._space),this.node.append(h("div","mk-Log-bar",{},this._search,this._ranks,this._count,this._follow,s,n),this._scroll),e.append(this.node),this._theme=new B(this.node,()=>{}),this._disposables.listen(this._search,"input",()=>this._refilter()),this._disposables.listen(this._ranks,"input",()=>this._refilter()),this._disposables.listen(this._scroll,"scroll",()=>this._scrolled(),{passive:!0}),this._disposables.add($(this._scroll,()=>this._changed())),this._setFollowing(!0),this._begin(t,i)}append(e,t=0){let i=t?[[-1,"note",x("%1 line was left out","%1 lines were left out",t)],...e]:e,s=this.buffer.append(i);s&&!this._following&&(this._scroll.scrollTop-=s*q),this._changed()}update(){this._changed()}dispose(){this._disposed=!0,this._frame.cancel(),this._disposables.dispose(),this._theme.dispose(),this.node.remove()}_begin(e,{mesh:t,ranks:i=[]}){let s=[],n=()=>{s?.forEach(([r,a])=>this.append(r,a)),s=null};e.ask("log",t,i,{lines:Pt}).then(({lines:r,dropped:a})=>{this._disposed||(this.append(r,a),n())},r=>{this._disposed||(this._note(r),n())}),this._disposables.add(e.follow(t,i,"",({lines:r,dropped:a})=>{s?s.push([r,a]):this.append(r,a)},r=>this._note(r)))}_note(e){this.append([[-1,"note",[e.message,e.hint].filter(Boolean).join(" ")]])}_refilter(){let e=this._ranks.value.trim(),t=e?Xe(e):null;p(this._ranks,"aria-invalid",e!==""&&t===null?"true":void 0),this.buffer.filter({search:this._search.value,ranks:t&&new Set(t)}),this._changed()}_setFollowing(e){this._following=e,p(this._follow,"aria-pressed",String(e)),this._changed()}_scrolled(){let t=this._scroll.scrollHeight-this._scroll.scrollTop-this._scroll.clientHeight<q;t!==this._following&&(this._following=t,p(this._follow,"aria-pressed",String(t))),this._frame.cancel(),this._draw()}_changed(){this._frame.request()}_draw(){let{length:e,total:t}=this.buffer,i=`${e*q}px`;this._space.style.height!==i&&(this._space.style.height=i);let s=this._scroll.clientHeight;this._following&&(this._scroll.scrollTop=Math.max(0,e*q-s));let n=e===t?x("%1 line","%1 lines",t):l("%1 of %2 lines",e,t);f(this._count,n);let r=Math.max(0,Math.floor(this._scroll.scrollTop/q)-at),a=Math.min(e-r,Math.ceil(s/q)+2*at);for(;this._lines.length<a;){let d=h("div","mk-Log-line",{},h("span","mk-Log-rank"),h("span","mk-Log-text"));this._lines.push(d),this._space.append(d)}this._lines.forEach((d,m)=>{let c=m<a?this.buffer.line(r+m):void 0;d.hidden=!c,c&&this._fill(d,c,r+m)})}_fill(e,[t,i,s],n){e.style.transform=`translateY(${n*q}px)`,e.dataset.stream=i;let[r,a]=e.children;if(r&&a){f(r,t>=0?String(t):"");let d=this._search.value.toLowerCase();!d||i==="note"?f(a,s):a.replaceChildren(...$t(s,d))}}};function $t(o,e){let t=o.toLowerCase(),i=[],s=0;for(let n=t.indexOf(e);n>=0;n=t.indexOf(e,s))i.push(o.slice(s,n),h("mark","",{},o.slice(n,n+e.length))),s=n+e.length;return i.push(o.slice(s)),i}var zt=1e3,Gt=2e3,de=class{constructor(e,t,i){this._store=t;this._options=i;this._again=g("mk-Button mk-Reading-again",i.again,()=>this.ask()),this.node.append(this._page,h("div","mk-Reading-row",{},this._again,this._age)),e.append(this.node),this._timer=setInterval(()=>this.update(),zt),this.ask()}_store;_options;node=h("div","mk-Reading");_page=h("div","mk-Reading-page");_age=h("span","mk-Faint mk-Reading-age");_again;_timer;_about="";_read=0;_asked=0;_asking=!1;_disposed=!1;get isFresh(){return this._read>0&&!this._asking&&this._about===this._options.about()}ask(){if(this._asking)return;this._asking=!0,this._again.disabled=!0,this._asked=Date.now();let e=this._options.about(),t=this._store.now();this._read||this._page.replaceChildren(h("div","mk-Note",{},this._options.asking));let i=(...s)=>{this._asking=!1,this._disposed||(this._about=e,this._read=t,this._again.disabled=!1,this._page.replaceChildren(...s),this._tell())};this._options.ask().then(s=>i(...s),s=>i(this._options.refusal(s)))}clear(){this._read=0,this._page.replaceChildren(),this._tell()}update(){this._tell(),this._about!==this._options.about()&&Date.now()-this._asked>=Gt&&!this.node.closest("[hidden]")&&document.visibilityState!=="hidden"&&this.ask()}dispose(){this._disposed=!0,clearInterval(this._timer),this.node.remove()}_tell(){f(this._age,this._read?l("read %1 ago",L(this._store.now()-this._read)):"")}};function lt(o,e,t=[]){let i=o.ranks(e);return(t.length?t.flatMap(n=>i[n]??[]):i).map(({proc:n,pid:r,state:a,doing:d,stop:m})=>[n,r,a,d,m?.file,m?.line,m?.function].join(" ")).join(`
`)}var jt=["overview","stack","log","variables"],qt=["debug","interrupt","kill","heal"];function Wt(o){switch(o){case"overview":return l("Overview");case"stack":return l("Stack");case"log":return l("Log");case"variables":return l("Variables")}}function De(o){switch(o){case"debug":return l("Debug");case"interrupt":return l("Interrupt");case"kill":return l("Kill");case"heal":return l("Heal")}}function Ut(o,e){let{state:t}=e,i=t==="dead"||t==="ended";return o==="heal"?i?"":l("This rank is alive."):i?l("This rank is not alive."):o==="interrupt"&&!et(e)?l("This rank runs nothing."):""}var he=class{constructor(e,t,i,s){this._store=t;this._actions=i;this._closed=s;let n=g("mk-Button mk-Details-close","\xD7",()=>this.close(),{"aria-label":l("Close")});this._head.append(this._icon,this._title,n);for(let r of jt){let a=g("mk-Tab",Wt(r),()=>this._open(r),{role:"tab",tabindex:-1});this._tabButtons.set(r,a),this._tabs.append(a)}z(this._tabs,()=>[...this._tabButtons.values()],this._disposables),this.node.append(this._head,this._cause,this._deeds,this._result,this._tabs,this._page),e.append(this.node)}_store;_actions;_closed;node=h("section","mk-Details",{hidden:!0});_head=h("div","mk-Details-head");_icon=h("span","mk-Details-icon");_title=h("span","mk-Details-title");_cause=h("div","mk-Details-cause");_deeds=h("div","mk-Details-deeds",{role:"group"});_result=h("div","mk-Details-result",{role:"status"});_tabs=h("div","mk-Tabs",{role:"tablist"});_page=h("div","mk-Details-page",{role:"tabpanel",tabindex:0});_buttons=new Map;_tabButtons=new Map;_disposables=new y;_mesh="";_rank=-1;_promised=!1;_tab="overview";_facts;_log;_reading;get rank(){return this._rank}show(e,t){(e!==this._mesh||t!==this._rank)&&(this._mesh=e,this._rank=t,this._say("",""),this._offer(),this.node.hidden=!1,this.node.setAttribute("aria-label",l("Rank %1",t)),this._open(this._tab)),this.update()}close(){this._rank>=0&&(this._rank=-1,this._clear(),this.node.hidden=!0,this._closed())}update(){let e=this._store.rank(this._mesh,this._rank);if(!e)return;let t=`${e.state} ${e.older}`;this._icon.dataset.look!==t&&(this._icon.dataset.look=t,this._icon.replaceChildren(C(e.state,e.older))),this._promised&&e.state==="stopped"&&this._say("",""),f(this._title,l("Rank %1 \xB7 %2",e.rank,w(e.state))),T(this._cause,P(e)),p(this.node,"data-state",e.state);for(let[i,s]of this._buttons){let n=Ut(i,e);p(s,"disabled",!!n),p(s,"title",n||void 0)}this._facts?.update(e),this._reading?.update()}dispose(){this._clear(),this._disposables.dispose(),this.node.remove()}_clear(){this._facts=void 0,this._log?.dispose(),this._log=void 0,this._reading?.dispose(),this._reading=void 0,this._page.replaceChildren()}_open(e){this._tab=e,this._clear();for(let[t,i]of this._tabButtons)p(i,"aria-selected",String(t===e)),i.tabIndex=t===e?0:-1;switch(this._page.dataset.tab=e,e){case"overview":this._facts=new Oe(this._page,this._store),this.update();break;case"log":this._log=new le(this._page,this._actions,{mesh:this._mesh,ranks:[this._rank]});break;case"stack":this._read(async(t,i)=>Kt((await this._actions.ask("stack",t,[i])).stacks));break;case"variables":this._read(async(t,i)=>{let{frame:s,variables:n}=await this._actions.ask("variables",t,[i],{frame:0}),r=s?l("%1, %2, line %3",s.function,s.file,s.line):"";return[...r?[h("div","mk-Place",{},r)]:[],Jt(n)]});break}}_read(e){let[t,i]=[this._mesh,this._rank];this._reading=new de(this._page,this._store,{again:l("Ask again"),asking:l("Asking rank %1 \u2026",i),ask:()=>e(t,i),about:()=>lt(this._store,t,[i]),refusal:s=>Yt(s)})}_offer(){this._buttons.clear(),this._deeds.setAttribute("aria-label",l("Do with rank %1",this._rank));for(let e of qt){let t=()=>this._pressed(e);this._buttons.set(e,g("mk-Button",De(e),t,{"data-deed":e}))}this._deeds.replaceChildren(...this._buttons.values()),this.update()}_pressed(e){e==="kill"?this._confirm():this._perform(e==="debug"&&this._promised?"undebug":e)}_promise(e){this._promised=e;let t=this._buttons.get("debug");t&&f(t,e?l("Do not stop"):De("debug"))}_confirm(){let e=g("mk-Button",l("Keep"),()=>{this._offer(),this._buttons.get("kill")?.focus()}),t=g("mk-Button",l("Kill"),()=>{this._offer(),this._perform("kill")},{"data-deed":"kill","data-sure":!0}),i=h("span","mk-Details-question",{},l("Kill rank %1?",this._rank));this._buttons.get("kill")?.replaceWith(e,t,i),this._buttons.delete("kill"),e.focus()}_perform(e){let t=this._rank,i=(s,n,r)=>{t===this._rank&&this._say(s,n,r)};this._say(l("%1: asked \u2026",e==="undebug"?l("Do not stop"):De(e)),""),this._actions.perform(e,this._mesh,[t]).then(s=>{i(s?.text||l("Done."),"",!1),t===this._rank&&this._promise(e==="debug"&&this._store.rank(this._mesh,t)?.state!=="stopped")},s=>i(s.message,s.hint,!0))}_say(e,t,i=!1){this._promise(!1),T(this._result,[e,t].filter(Boolean).join(" ")),p(this._result,"data-failed",i)}},Oe=class{constructor(e,t){this._store=t;let i=h("tr");for(let[s,n]of[[l("Actor"),!1],[l("Runs"),!1],[l("Waiting"),!0],[l("Calls"),!0],[l("Failed"),!0]])i.append(h("th",n?"mk-mod-number":"",{scope:"col"},s));this._actors.append(h("thead","",{},i),this._rows),e.append(this._list,this._actors)}_store;_values=new Map;_list=h("dl","mk-Facts");_actors=h("table","mk-Table");_rows=h("tbody");update(e){let t=this._store.now(),i=Object.entries(e.gpu_memory).map(([s,n])=>l("GPU %1: %2",s,D(n)));for(this._fact(l("Runs"),Q(e,t)||l("nothing")),this._fact(l("Waiting"),String(e.waiting)),this._fact(l("Memory"),[e.rss?D(e.rss):"\u2013",...i].join(" \xB7 ")),this._fact(l("Processor"),l("%1 %",Math.round(e.cpu))),this._fact(l("Host"),this._store.hostName(e.host)||"\u2013"),this._fact(l("Process"),e.pid?String(e.pid):"\u2013"),this._fact(l("Up"),e.started?L(t-e.started):"\u2013"),this._fact(l("Calls"),e.failures?l("%1, %2 failed",e.calls,e.failures):String(e.calls)),this._fact(l("Sent"),Ce(e.sent)),this._fact(l("Received"),Ce(e.received)),this._fact(l("Tree"),e.older?l("has modules older than its host"):l("as its host")),this._actors.hidden=e.actors.length===0;this._rows.rows.length>e.actors.length;)this._rows.deleteRow(-1);e.actors.forEach((s,n)=>{let r=this._rows.rows[n]??this._addRow(),a=s.endpoint?`${s.endpoint}${s.since?` \xB7 ${A(Math.max(0,t-s.since))}`:""}`:"\u2013";[s.name,a,s.waiting,s.calls,s.failures].forEach((d,m)=>{let c=r.cells[m];c&&T(c,String(d))}),p(r,"title",s.cls||void 0)})}_addRow(){let e=this._rows.insertRow();for(let t=0;t<5;t++)e.insertCell().className=t>1?"mk-mod-number":"";return e}_fact(e,t){let i=this._values.get(e);i||(i=h("dd"),this._values.set(e,i),this._list.append(h("dt","",{},e),i)),T(i,t)}};function Kt(o){return o.length?o.map(({ranks:e,frames:t,note:i})=>{let s=h("ol","mk-Stack");[...t].reverse().forEach(a=>{let d=h("li");d.append(h("span","mk-Stack-function",{},a.function),h("span","mk-Stack-place",{},l("%1:%2",a.file,a.line))),a.text&&d.append(h("code","mk-Stack-text",{},a.text.trim())),s.append(d)});let n=[e.length>1?F(e):"",i??""].filter(Boolean).join(" \xB7 "),r=t.length?s:h("div","mk-Note",{},l("No user code runs."));return h("div","",{},...n?[h("div","mk-Place",{},n)]:[],r)}):[h("div","mk-Note",{},l("No Python stack."))]}function Jt(o){if(!o.length)return h("div","mk-Note",{},l("No variables."));let e=o.map(({name:t,type:i,text:s})=>{let n=h("tr");return n.append(h("th","mk-Code",{scope:"row",title:t},t),h("td","mk-Faint",{title:i},i),h("td","mk-Code",{title:s},s)),n});return h("table","mk-Table mk-Variables",{},h("tbody","",{},...e))}function Yt(o){let e=h("div","mk-Refusal",{role:"alert"},h("div","",{},o.message));return o.hint&&e.append(h("div","mk-Faint",{},o.hint)),e}var me=class{constructor(e){this._root=e;e.append(this._node)}_root;_node=h("div","mk-Tooltip",{role:"tooltip",hidden:!0});show(e,t){this._node.replaceChildren(e),this._node.hidden=!1;let i=this._root.getBoundingClientRect(),{offsetWidth:s,offsetHeight:n}=this._node,r=Math.min(t.left-i.left,i.width-s-4),a=t.bottom-i.top+6,d=t.top-i.top-n-6,m=t.bottom+6+n>window.innerHeight&&d>=0?d:a;this._node.style.transform=`translate(${Math.max(4,r)}px, ${m}px)`}hide(){this._node.hidden=!0}dispose(){this._node.remove()}};function dt(o,e){let t=h("div",o);return f(t,e),t}function ht(o,e,t){let i=h("div"),s=h("div","mk-Tooltip-head");s.append(C(o.state,o.older),dt("mk-Tooltip-title",l("rank %1 \xB7 %2",o.rank,w(o.state)))),i.append(s);let n=P(o),r=[o.waiting?x("%1 message waits","%1 messages wait",o.waiting):"",o.rss?D(o.rss):"",e].filter(Boolean);for(let[a,d]of[["mk-Tooltip-cause",n],["mk-Tooltip-doing",Q(o,t)],["mk-Tooltip-facts",r.join(" \xB7 ")],["mk-Tooltip-facts",o.older?l("modules of an older tree than its host has"):""]])d&&i.append(dt(a,d));return i}var ce=class{constructor(e,t,i){this._content=i;this._space.setAttribute("aria-label",t),this._context=this._canvas.getContext("2d"),this._stop=this._makeStop(),this._space.append(this._canvas,this._hover,this._selection,this._stop),this.node.append(this._space),e.append(this.node),this._layout=this._content.layout(1),this._listen(),this.relayout()}_content;node=h("div","mk-Cells",{tabindex:-1});_space=h("div","mk-Cells-space",{role:"group"});_canvas=h("canvas","mk-Cells-canvas",{"aria-hidden":"true"});_hover=h("div","mk-Cells-hover",{hidden:!0});_selection=h("div","mk-Cells-selection",{hidden:!0});_stop;_context;_disposables=new y;_frame=new N(()=>this._draw());_layout;_width=0;_viewHeight=0;_ratio=1;_dirty="all";_active=0;_selected=-1;_pointed=-1;relayout(){let e=this._space.clientWidth||this.node.clientWidth||300;this._width=e,this._layout=this._content.layout(e),this._active=Math.min(this._active,Math.max(0,this._layout.count-1)),this._space.style.height=`${this._layout.height}px`,this._viewHeight=Math.min(this.node.clientHeight||this._layout.height,this._layout.height),this._resize(),this._place(),this.redraw()}redraw(e){if(!e)this._dirty="all";else if(this._dirty!=="all")for(let t of e)this._dirty.add(t);this._frame.request()}select(e,t=!0){this._selected=e,e>=0&&(this._active=e,t&&this._scrollTo(e)),this._place()}repoint(){this._pointed>=0&&this._content.point(this._pointed,this._placeOf(this._pointed))}focus(){this._stop.focus()}dispose(){this._content.point(-1,null),this._frame.cancel(),this._disposables.dispose(),this.node.remove()}_listen(){let{_disposables:e,node:t}=this;e.listen(t,"scroll",()=>this._scrolled(),{passive:!0}),e.listen(this._space,"pointermove",i=>this._point(this._itemAt(i))),e.listen(this._space,"pointerleave",()=>this._point(-1)),e.listen(this._space,"click",i=>{let s=i.target===this._stop?this._active:this._itemAt(i);s>=0&&(this._active=s,this._place(),this._content.pick(s))}),e.listen(this._space,"keydown",i=>this._keyed(i)),e.add($(t,()=>{let i=this._space.clientWidth,s=Math.min(t.clientHeight,this._layout.height);(i!==this._width||s!==this._viewHeight||Pe()!==this._ratio)&&this.relayout()})),e.listen(window,"resize",()=>{Pe()!==this._ratio&&this.relayout()})}_scrolled(){this._dirty="all",this._frame.cancel(),this._draw(),this._point(-1)}_resize(){this._ratio=Pe();let e=Math.round(this._width*this._ratio),t=Math.round(this._viewHeight*this._ratio);(this._canvas.width!==e||this._canvas.height!==t)&&(this._canvas.width=e,this._canvas.height=t,this._canvas.style.width=`${this._width}px`,this._canvas.style.height=`${this._viewHeight}px`)}_draw(){let e=this._context,t=this._dirty;if(this._dirty=new Set,!e||!this._viewHeight)return;let i=this.node.scrollTop,s=i+this._viewHeight,[n,r]=this._layout.between(i,s);if(e.setTransform(this._ratio,0,0,this._ratio,0,-Math.round(i*this._ratio)),t==="all"){e.clearRect(0,i,this._width,this._viewHeight+1),this._drawLabels(e,i,s);for(let a=n;a<r;a++)this._content.paint(e,this._ratio,a,this._layout.box(a));return}for(let a of t)if(a>=n&&a<r){let d=this._layout.box(a);e.clearRect(d.x-.5,d.y-.5,d.width+1,d.height+1),this._content.paint(e,this._ratio,a,d)}}_drawLabels(e,t,i){for(let s of this._layout.labels){if(s.y>i)break;s.y+s.height>=t&&this._content.paintLabel(e,this._ratio,s.group,s)}}_itemAt(e){let{left:t,top:i}=this._space.getBoundingClientRect();return this._layout.at(e.clientX-t,e.clientY-i)}_point(e){e!==this._pointed&&(this._pointed=e,this._hover.hidden=e<0,e>=0&&Ie(this._hover,this._layout.box(e)),this._content.point(e,e<0?null:this._placeOf(e)))}_placeOf(e){let t=this._space.getBoundingClientRect(),{x:i,y:s,height:n}=this._layout.box(e);return{left:t.left+i,top:t.top+s,bottom:t.top+s+n}}_keyed(e){if(e.target!==this._stop)return;let i={ArrowRight:[1,0],ArrowLeft:[-1,0],ArrowDown:[0,1],ArrowUp:[0,-1],Home:[-this._layout.count,0],End:[this._layout.count,0]}[e.key];if(!i)return;e.preventDefault(),e.stopPropagation();let s=e.key==="Home"?0:e.key==="End"?this._layout.count-1:void 0;this._active=s??this._layout.move(this._active,...i),this._scrollTo(this._active);let n=this._makeStop(),r=this._stop;this._stop=n,this._space.append(n),this._place(),n.focus({preventScroll:!0}),r.remove()}_makeStop(){let e=h("button","mk-Cells-stop",{type:"button"});return e.addEventListener("focus",()=>{p(e,"aria-label",this._content.describe(this._active)),e.matches(":focus-visible")&&this._point(this._active)}),e.addEventListener("blur",()=>this._point(-1)),e}_place(){this._layout.count&&(Ie(this._stop,this._layout.box(this._active)),p(this._stop,"aria-label",this._content.describe(this._active))),this._stop.hidden=!this._layout.count;let e=this._selected>=0&&this._selected<this._layout.count;this._selection.hidden=!e,e&&Ie(this._selection,this._layout.box(this._selected))}_scrollTo(e){let{y:t,height:i}=this._layout.box(e),{scrollTop:s}=this.node;t<s+4?this.node.scrollTop=Math.max(0,t-24):t+i>s+this._viewHeight-4&&(this.node.scrollTop=t+i-this._viewHeight+24)}};function Ie(o,e){o.style.transform=`translate(${e.x}px, ${e.y}px)`,o.style.width=`${e.width}px`,o.style.height=`${e.height}px`}function Pe(){return window.devicePixelRatio||1}var Fe=class{constructor(e,t,i){this._store=t;this._namesHost=i;this._icon=C(e.state,e.older);let s=h("span","mk-Card-head",{},this._icon);s.append(h("span","mk-Card-rank",{},String(e.rank)),this._state),this.node=h("button","mk-Card",{type:"button",tabindex:-1},s,this._doing,this._facts),this.update(e)}_store;_namesHost;node;_icon;_shown="";_state=h("span","mk-Card-state");_what=h("span","mk-Card-what");_time=h("span","mk-Card-time");_doing=h("span","mk-Card-doing",{},this._what,this._time);_facts=h("span","mk-Card-facts");update(e){let t=this._store.now(),i=`${e.state} ${e.older}`;if(i!==this._shown){let a=C(e.state,e.older);this._icon.replaceWith(a),this._icon=a,this._shown=i,this.node.dataset.state=e.state}f(this._state,w(e.state));let s=O(e.state)?P(e):"";T(this._what,s||e.doing),f(this._time,!s&&e.doing&&e.doing_since?A(Math.max(0,t-e.doing_since)):""),p(this.node,"data-reason",!!s);let n=this._store.hostName(e.host),r=[e.rss?D(e.rss):"",e.waiting?l("%1 waiting",e.waiting):"",this._namesHost?n:""];T(this._facts,r.filter(Boolean).join(" \xB7 ")),p(this.node,"aria-label",ae(e,n,t))}},pe=class{constructor(e,t,i,s,n,r){this._store=i;this.node.setAttribute("aria-label",t);let a=s.length>1&&s.every(m=>m.ranks.length===1);for(let m of s){let c=m.ranks.flatMap(u=>{let k=n[u];if(!k)return[];let _=new Fe(k,this._store,a);return _.node.addEventListener("click",()=>r(u)),this._cards.set(u,_),[_.node]});if(a)this.node.append(...c);else{let u=h("div","mk-Cards-host");T(u,this._store.hostName(m.host)),this.node.append(u,...c)}}z(this.node,()=>[...this._cards.values()].map(m=>m.node),this._disposables);let d=this._cards.values().next().value;d&&(d.node.tabIndex=0),e.append(this.node)}_store;node=h("div","mk-Cards",{role:"group"});_cards=new Map;_disposables=new y;update(e){for(let[t,i]of this._cards){let s=e[t];s&&i.update(s)}}select(e){for(let[t,i]of this._cards)p(i.node,"aria-pressed",t===e?"true":void 0)}focus(e){this._cards.get(e)?.node.focus()}dispose(){this._disposables.dispose(),this.node.remove()}};function ze(o,e){return o<=16?"cards":o<=256||e<=1?"cells":"hosts"}function Qt(o){return o<=64?[28,24,22]:o<=256?[20,18]:o<=1024?[16]:[14]}var ct=2,mt=20,Xt=8,G=16;function pt(o,e,t=!0){let i=o.reduce((M,I)=>M+I.ranks.length,0),s=o.reduce((M,I)=>Math.max(M,I.ranks.length),1),n=t?e>=480?104:76:0,r=Qt(i),a=r.find(M=>n+s*M<=e),d=a!==void 0,m=a??r[0]??14,c=d?n:0,u=t&&!d?mt:0,k=Math.max(1,Math.floor((e-c)/m)),_=Math.min(s,k>8?k-k%8:k),v=c+_*m+G,b=d?Math.max(1,Math.floor((e+G)/v)):1,R=[],E=[],J=0,j=0;for(let M=0;M<o.length;M+=b){let I=0;o.slice(M,M+b).forEach((ve,qe)=>{let be=qe*v,We=u+Math.ceil(ve.ranks.length/_)*m;if(R.push({x:be+c,y:j+u,columns:_,first:J,count:ve.ranks.length,height:We}),t){let gt=d?{x:be,y:j,width:c-8,height:m-ct}:{x:be,y:j,width:e-8,height:mt};E.push({...gt,group:M+qe})}J+=ve.ranks.length,I=Math.max(I,We)}),j+=I+(d&&I===m?0:Xt)}return new $e(R,E,m,j,i)}var $e=class{constructor(e,t,i,s,n){this._blocks=e;this.labels=t;this._pitch=i;this.height=s;this.count=n}_blocks;labels;_pitch;height;count;box(e){let t=this._blocks[this._blockOf(e)];if(!t)return{x:0,y:0,width:0,height:0};let i=e-t.first,s=this._pitch-ct;return{x:t.x+i%t.columns*this._pitch,y:t.y+Math.floor(i/t.columns)*this._pitch,width:s,height:s}}at(e,t){let[i,s]=this._blocksBetween(t,t);for(let n of this._blocks.slice(i,s)){let r=Math.floor((e-n.x)/this._pitch),a=Math.floor((t-n.y)/this._pitch),d=a*n.columns+r;if(r>=0&&r<n.columns&&a>=0&&d<n.count)return n.first+d}return-1}between(e,t){let[i,s]=this._blocksBetween(e,t),n=this._blocks.slice(i,s),r=n.length===1?n[0]:void 0;if(r){let d=u=>Math.floor((u-r.y)/this._pitch),m=Math.max(0,d(e))*r.columns,c=Math.min(r.count,(d(t)+1)*r.columns);return[r.first+Math.min(m,r.count),r.first+Math.max(0,c)]}let a=n.at(-1);return a?[n[0]?.first??0,a.first+a.count]:[0,0]}move(e,t,i){if(t)return Math.min(this.count-1,Math.max(0,e+t));let{x:s,y:n,width:r}=this.box(e),a=s+r/2;for(let d=1;d<=4;d++){let m=this.at(a,n+i*d*this._pitch+this._pitch/2);if(m>=0&&m!==e)return m}return e}_blockOf(e){return ue(this._blocks.length,t=>(this._blocks[t]?.first??0)<=e)-1}_blocksBetween(e,t){let i=ue(this._blocks.length,n=>(this._blocks[n]?.y??0)<=t),s=ue(this._blocks.length,n=>this._bottomOfRow(n)<e);return s=Math.min(s,i),[s,i]}_bottomOfRow(e){let t=this._blocks[e]?.y??0,i=this._blocks[ue(this._blocks.length,s=>(this._blocks[s]?.y??0)<=t)];return i?i.y:this.height}};function ue(o,e){let t=0,i=o;for(;t<i;){let s=t+i>>1;e(s)?t=s+1:i=s}return t}var U=30,Zt=260;function ut(o,e){let t=Math.max(1,Math.floor((e+G)/(Zt+G))),i=Math.floor((e-(t-1)*G)/t);return{height:Math.ceil(o/t)*U,count:o,labels:[],box:n=>({x:n%t*(i+G),y:Math.floor(n/t)*U,width:i,height:U-4}),at:(n,r)=>{let a=Math.floor(n/(i+G)),d=Math.floor(r/U)*t+a;return n>=0&&r>=0&&a<t&&n-a*(i+G)<i&&d<o?d:-1},between:(n,r)=>[Math.min(o,Math.max(0,Math.floor(n/U))*t),Math.min(o,Math.max(0,Math.floor(r/U)+1)*t)],move:(n,r,a)=>{let d=n+r+a*t;return d>=0&&d<o?d:n}}}var ei=20,ti={tint:.3,outline:.08},fe=class{constructor(e,t,i){this._context=e;this._palette=t;this._ratio=i}_context;_palette;_ratio;_sprites=new Map;_cut=new Map;fits(e){return e===this._ratio}rank(e,t){let i=t.width>=ei&&(e.state==="idle"||e.state==="running"),s=this._sprite(e.state,e.older,t.width,!i);if(this._context.drawImage(s,t.x,t.y,t.width,t.height),i){let n=this._context;n.fillStyle=this._palette.text,n.font=`${e.rank>99?9:11}px ${this._palette.font}`,n.textAlign="center",n.textBaseline="middle",n.fillText(String(e.rank),t.x+t.width/2,t.y+t.height/2+.5)}}label(e,t,i=!0){let s=this._context;s.fillStyle=i?this._palette.faint:this._palette.text,s.font=`12px ${this._palette.font}`,s.textAlign="left",s.textBaseline="middle",s.fillText(this._fit(e,t.width),t.x,t.y+t.height/2+.5)}host(e,t,i){let s=this._context,{states:n,track:r}=this._palette,a=Math.round(i.width*.34),d=92;this.label(e,{...i,width:a-8},!1);let m=i.x+a,c=i.width-a-d,u=i.y+7,k=i.height-14;s.fillStyle=r,s.fillRect(m,u,c,k);let _=0;for(let b of S){let R=t.states[b]/t.total*c;if(R>0){let E=Math.min(c-_,Math.max(O(b)?3:0,R));b==="idle"||b==="ended"?(s.strokeStyle=n[b],s.lineWidth=1,s.strokeRect(m+_+.5,u+.5,Math.max(0,E-1),k-1)):(s.fillStyle=n[b],s.globalAlpha=O(b)?1:.55,s.fillRect(m+_,u,E,k),s.globalAlpha=1),_+=E}}let v=S.find(b=>t.states[b]>0);if(v){let R=i.x+i.width-d+8;s.drawImage(this._sprite(v,!1,14,!0),R,i.y+(i.height-14)/2,14,14);let E={x:R+14+5,y:i.y,width:d-14-13,height:i.height};this.label(`${t.states[v]} ${w(v)}`,E,!O(v))}}_sprite(e,t,i,s){let n=`${e} ${t} ${i} ${s}`,r=this._sprites.get(n);if(r)return r;let a=document.createElement("canvas");a.width=a.height=Math.round(i*this._ratio);let d=a.getContext("2d");return d&&(d.scale(a.width/16,a.height/16),this._draw(d,e,t,s,16/i)),this._sprites.set(n,a),a}_draw(e,t,i,s,n){let{box:r,path:a}=He[t],d=this._palette.states[t];e.fillStyle=e.strokeStyle=d,e.lineWidth=n;let m=n/2;if(r!=="none"&&(e.beginPath(),e.roundRect(m,m,16-n,16-n,2.5),r==="solid"?e.fill():r==="dotted"?e.setLineDash([2*n,2*n]):(e.globalAlpha=ti[r],e.fill(),e.globalAlpha=1),e.stroke()),a&&s&&(e.fillStyle=r==="solid"?this._palette.on:d,e.fill(new Path2D(a))),i){let c=new Path2D(Ae);e.setLineDash([]),e.fillStyle=this._palette.text,e.strokeStyle=this._palette.surface,e.fill(c),e.stroke(c)}}_fit(e,t){let i=`${t} ${e}`,s=this._cut.get(i);if(s!==void 0)return s;let n=e;if(this._context.measureText(e).width>t){let r=e.length-1;do{r--;let a=Math.ceil(r/2);n=`${e.slice(0,a)}\u2026${e.slice(e.length-(r-a))}`}while(r>2&&this._context.measureText(n).width>t)}return this._cut.set(i,n),n}};var _e=class{constructor(e,t,i,s,n,r,a=[]){this._store=t;this._mesh=i;this._theme=s;this._tooltip=n;this._pick=r;this._only=a.length?new Set(a):null,this._back=g("mk-Button mk-Grid-back",l("All hosts"),()=>this._zoom("")),this.node.append(h("div","mk-Grid-path",{},this._back,this._place),this._body),this.node.addEventListener("keydown",d=>{d.key==="Escape"&&this._zoomed&&(d.stopPropagation(),this._zoom(""))}),e.append(this.node),this.update()}_store;_mesh;_theme;_tooltip;_pick;node=h("div","mk-Grid");_body=h("div","mk-Grid-body");_back;_place=h("span","mk-Grid-place");_only;_groups=[];_ranks=[];_shownRanks=[];_cellOf=new Map;_groupOf=new Map;_mode="cards";_chosen;_zoomed="";_selected=-1;_cards;_canvas;_painter;get mode(){return this._zoomed?"hosts":this._mode}get hasModes(){return this._groups.length>1&&ze(this._count,this._groups.length)!=="cards"}setMode(e){this._chosen=e,this._zoomed="",this._build()}update(e){if(!this._store.meshes.has(this._mesh))return;if(this._ranks=this._store.ranks(this._mesh),!e||e.structure){let i=nt(this._ranks.filter(n=>!this._only||this._only.has(n.rank))),s=this._canvas||this._cards?ii(i,this._groups):!1;if(this._groups=i,!s){this._build();return}}this._cards?.update(this._ranks);let t=e&&!e.structure?e.ranks.get(this._mesh):void 0;!this._canvas||e&&!e.structure&&!t||(this._canvas.redraw(t&&this._itemsOf(t)),this._canvas.repoint())}tick(){this._cards?.update(this._ranks),this._canvas?.repoint()}repaint(){this._painter=void 0,this._canvas?.redraw()}focus(e){this._cards?.focus(e),this._canvas?.focus()}select(e){if(this._selected=e,this._cards?.select(e),this._canvas&&e>=0&&this._mode==="cells"&&!this._cellOf.has(e)){this._zoom(this._ranks[e]?.host??"");return}this._markSelected()}resize(){this._canvas?.relayout()}dispose(){this._clear(),this.node.remove()}get _count(){return this._groups.reduce((e,t)=>e+t.ranks.length,0)}_zoom(e){let t=this._zoomed;if(this._zoomed=e,this._build(),this._canvas){let i=this._groups.findIndex(s=>s.host===t);this._canvas.focus(),!e&&i>=0&&this._mode==="hosts"&&this._canvas.select(i)}}_clear(){this._cards?.dispose(),this._canvas?.dispose(),this._cards=void 0,this._canvas=void 0,this._tooltip.hide()}_build(){this._clear();let e=this._groups;this._zoomed&&!e.some(r=>r.host===this._zoomed)&&(this._zoomed="");let t=ze(this._count,e.length);this._mode=this._zoomed?"cells":t==="cards"?t:this._chosen??t,this.node.dataset.mode=this._mode,this.node.dataset.zoomed=String(!!this._zoomed),f(this._place,this._zoomed?this._store.hostName(this._zoomed):"");let i=this._store.meshes.get(this._mesh)?.name??"";if(this._mode==="cards"){this._cards=new pe(this._body,l("Ranks of %1",i),this._store,e,this._ranks,r=>this._pick(r)),this._cards.select(this._selected);return}let s=this._zoomed?e.filter(r=>r.host===this._zoomed):e;this._shownRanks=s.flatMap(r=>r.ranks),this._cellOf=new Map(this._shownRanks.map((r,a)=>[r,a])),this._groupOf=new Map(e.flatMap((r,a)=>r.ranks.map(d=>[d,a])));let n=this._mode==="hosts"?l("Hosts of %1",i):l("Ranks of %1",i);this._painter=void 0,this._canvas=new ce(this._body,n,{layout:r=>this._layout(s,r),paint:(r,a,d,m)=>this._paint(r,a,d,m),paintLabel:(r,a,d,m)=>{this._paintWith(r,a).label(this._store.hostName(s[d]?.host??""),m)},describe:r=>this._describe(r),pick:r=>this._picked(r),point:(r,a)=>this._point(r,a)}),this._markSelected()}_layout(e,t){return this._mode==="hosts"?ut(e.length,t):pt(e,t,!this._zoomed)}_markSelected(){if(this._canvas){let e=this._mode==="hosts"?this._groupOf:this._cellOf;this._canvas.select(e.get(this._selected)??-1)}}_itemsOf(e){let t=this._mode==="hosts"?this._groupOf:this._cellOf;return[...e].flatMap(i=>t.get(i)??[])}_paintWith(e,t){return this._painter?.fits(t)||(this._painter=new fe(e,this._theme.palette,t)),this._painter}_paint(e,t,i,s){let n=this._paintWith(e,t);if(this._mode==="hosts"){let a=this._groups[i];a&&n.host(this._store.hostName(a.host),this._countsOf(a),s);return}let r=this._rankAt(i);r&&n.rank(r,s)}_rankAt(e){return this._ranks[this._shownRanks[e]??-1]}_countsOf(e){return Y(e.ranks.flatMap(t=>this._ranks[t]??[]))}_describe(e){let t=this._groups[e];if(this._mode!=="hosts"){let i=this._rankAt(e);return i?ae(i,this._store.hostName(i.host),this._store.now()):""}return t?`${this._store.hostName(t.host)}: ${this._states(t)}`:""}_states(e){let{states:t}=this._countsOf(e);return S.filter(i=>t[i]).map(i=>`${t[i]} ${w(i)}`).join(", ")}_picked(e){let t=this._groups[e];if(this._mode==="hosts"){this._zoom(t?.host??"");return}let i=this._shownRanks[e];i!==void 0&&this._pick(i)}_point(e,t){if(!t){this._tooltip.hide();return}let i=this._groups[e],s=this._rankAt(e);if(this._mode==="hosts"&&i){let n=h("div","",{},h("div","mk-Tooltip-title",{},this._store.hostName(i.host)));n.append(h("div","mk-Tooltip-facts",{},this._states(i))),this._tooltip.show(n,t)}else this._mode!=="hosts"&&s&&this._tooltip.show(ht(s,this._store.hostName(s.host),this._store.now()),t)}};function ii(o,e){return o.length===e.length&&o.every((t,i)=>{let s=e[i];return s?.host===t.host&&s.ranks.length===t.ranks.length&&t.ranks.every((n,r)=>n===s.ranks[r])})}var ke=class{constructor(e,t){this._pick=t;z(this.node,()=>[...this.node.querySelectorAll("button")],this._disposables),e.append(this.node)}_pick;node=h("div","mk-Legend",{role:"group","aria-label":l("Ranks by state")});_chips=new Map;_disposables=new y;update(e){let{states:t,older:i}=Y(e);this.node.style.setProperty("--mk-digits",`${String(e.length).length}ch`);for(let s of S)this._show(s,t[s]);this._show("older",i)}dispose(){this._disposables.dispose(),this.node.remove()}_show(e,t){let i=this._chips.get(e);if(!i){if(!t)return;i=this._add(e)}f(i.count,String(t)),p(i.node,"data-none",t===0);let s=e==="older"?l("with modules of an older tree"):w(e);p(i.node,"aria-label",x("%1 rank %2","%1 ranks %2",t,s))}_add(e){let t=h("span","mk-Legend-count"),i=g("mk-Legend-chip","",()=>this._pick(e),{tabindex:this._chips.size?-1:0,"data-trouble":e!=="older"&&O(e),title:e==="older"?l("Modules of an older tree than their hosts have"):l("Show the next one")}),s=e==="older"?l("older tree"):w(e);i.append(e==="older"?C("idle",!0):C(e),h("span","mk-Legend-name",{},s),t);let n={node:i,count:t};return this._chips.set(e,n),this.node.replaceChildren(...[...S,"older"].flatMap(r=>this._chips.get(r)?.node??[])),n}};var si=50,ge=class{constructor(e,t,i){this._store=t;this._pick=i;this._worst=g("mk-News-worst","",()=>this._go(this._troubles[0]?.ranks)),this._worst.append(this._worstIcon,this._worstText),this._more=g("mk-Button mk-News-more","",()=>this._toggle(),{"aria-expanded":"false"}),this._headline.append(this._name,this._count,this._news),this._strip.append(this._worst,this._more),this.node.append(this._headline,this._strip,this._list,this._spoken),e.append(this.node)}_store;_pick;node=h("div","mk-News");_headline=h("div","mk-News-headline");_name=h("span","mk-News-name");_count=h("span","mk-News-count");_news=h("span","mk-News-news");_spoken=h("div","mk-Spoken",{role:"status"});_strip=h("div","mk-News-strip");_worst;_worstIcon=h("span","mk-News-icon");_worstText=h("span","mk-News-text");_more;_list=h("ul","mk-News-list",{hidden:!0});_troubles=[];_failures=[];_listed="";_passing;update(e,t,i){let s=it(e,this._store.hosts,this._store.now());this._passing=s||i.length?()=>this.update(e,t,i):void 0;let n=st(e,t,s);f(this._name,e?.name??""),f(this._count,n.count),T(this._news,n.news),p(this._headline,"data-state",n.state||void 0),this._troubles=Ve(t),this._failures=ot(i).slice(0,si);let r=this._troubles[0],a=e?.hang||(s?`${Ne(s)}: ${s.then}`:""),d=r?this._sentence(r):a||this._calm(t);T(this._worstText,d),p(this._worst,"data-state",r?.state??(e?.hang?"hang":a?"walltime":void 0)),p(this._worst,"disabled",!r),this._icon(r);let m=Math.max(0,this._troubles.length-1)+this._failures.length;f(this._more,m?l("%1 more",m):l("none")),p(this._more,"data-empty",!m),!m&&!this._list.hidden&&this._toggle();let c=r||e?.hang?d:s?s.then:"";f(this._spoken,c?`${e?.name??""}: ${c}`:""),this._fill()}tick(){this._listed="",this._passing?.(),this._fill()}dispose(){this.node.remove()}_icon(e){let t=e?.state??"";this._worstIcon.dataset.state!==t&&(this._worstIcon.dataset.state=t,this._worstIcon.replaceChildren(...e?[C(e.state)]:[]))}_calm(e){let t=this._failures[0];if(t){let s=L(this._store.now()-t.last);return l("Nothing is wrong now; %1 ago, %2: %3",s,F(t.ranks),t.text)}let i=e.reduce((s,n)=>s+n.failures,0);return i?x("%1 call has failed","%1 calls have failed",i):l("Nothing has failed")}_sentence({state:e,reason:t,ranks:i,hosts:s}){let n=s.length===1?this._store.hostName(s[0]??""):x("%1 host","%1 hosts",s.length),r=l("%1 on %2 \xB7 %3",F(i),n,w(e));return t?`${r}: ${t}`:r}_go(e){let t=e?.[0];t!==void 0&&this._pick(t)}_toggle(){this._list.hidden=!this._list.hidden,p(this._more,"aria-expanded",String(!this._list.hidden)),this._listed="",this._fill()}_fill(){if(this._list.hidden)return;let e=this._store.now(),t=[...this._troubles.slice(1).map(s=>({icon:s.state,text:this._sentence(s),ranks:s.ranks})),...this._failures.map(({text:s,ranks:n,count:r,last:a})=>({icon:null,text:[l("%1 ago",L(e-a)),r>1?l("%1 times",r):"",F(n),s].filter(Boolean).join(" \xB7 "),ranks:n}))],i=t.map(s=>s.text).join(`
`);if(i!==this._listed){for(this._listed=i;this._list.children.length>t.length;)this._list.lastElementChild?.remove();t.forEach(({icon:s,text:n,ranks:r},a)=>{let d=this._list.children[a];d||(d=h("li","",{},g("mk-News-line","",()=>{})),this._list.append(d));let m=d.firstElementChild;m.onclick=()=>this._go(r);let c=h("span","mk-News-text",{},n);m.replaceChildren(...s?[C(s),c]:[c]),p(m,"data-state",s??void 0),p(m,"title",n)})}}};var ni=1e3,K=class{constructor(e,t,i,s={}){this._store=t;this._options=s;this.node.append(this._banner,this._meshes,this._empty,this._content),e.append(this.node),this._tooltip=new me(this.node),this._news=new ge(this._content,this._store,a=>this.select(a)),this._legend=new ke(this._bar,a=>this._next(a)),this._modes.setAttribute("aria-label",l("Show")),this._hostsMode=g("mk-Button",l("Hosts"),()=>this._setMode("hosts")),this._cellsMode=g("mk-Button",l("Ranks"),()=>this._setMode("cells")),this._modes.append(this._hostsMode,this._cellsMode),this._bar.append(this._modes),this._content.append(this._bar,this._main),s.details!==!1&&(this._details=new he(this._main,this._store,i,()=>this._closeDetails())),this._disposables.listen(this.node,"keydown",a=>{a.key==="Escape"&&this._selected>=0&&(a.stopPropagation(),this._closeDetails())}),this._theme=new B(this.node,()=>this._grid?.repaint()),z(this._meshes,()=>[...this._meshes.children],this._disposables),this._disposables.add(this._store.subscribe(a=>this._told(a))),this._disposables.add($(this.node,()=>this._fit()));let n=setInterval(()=>this._tick(),ni);this._disposables.add(()=>clearInterval(n));let{connection:r}=this._options;r&&(this._disposables.add(r.onConnection(()=>this._connected(r.connection))),this._connected(r.connection)),this._fit(),this._seen=this._store.now(),this.update()}_store;_options;node=h("div","mk-View mk-Board");_banner=h("div","mk-Banner",{role:"status",hidden:!0});_meshes=h("div","mk-Meshes mk-Tabs",{role:"tablist",hidden:!0});_empty=h("div","mk-Note mk-Board-empty");_content=h("div","mk-Board-content",{hidden:!0});_bar=h("div","mk-Board-bar");_main=h("div","mk-Board-main");_modes=h("div","mk-Modes",{role:"group"});_hostsMode;_cellsMode;_theme;_tooltip;_news;_legend;_details;_disposables=new y;_frame=new N(()=>this._apply());_grid;_mesh="";_selected=-1;_seen=0;_pending;get mesh(){return this._mesh}showMesh(e){e!==this._mesh&&this._store.meshes.has(e)&&(this.select(-1),this._mesh=e,this._grid?.dispose(),this._grid=void 0,this.update())}select(e){e!==this._selected&&(this._pending!==void 0&&this.update(),this._selected=e,e>=0?this._details?.show(this._mesh,e):this._details?.close(),p(this.node,"data-details",e>=0&&!!this._details),this._grid?.select(e),this._options.selected?.(this._mesh,e))}update(){this._pending=null,this._frame.cancel(),this._apply()}refresh(){this._theme.refresh(),this._fit(),this._grid?.resize()}dispose(){this._frame.cancel(),this._disposables.dispose(),this._grid?.dispose(),this._details?.dispose(),this._legend.dispose(),this._news.dispose(),this._theme.dispose(),this._tooltip.dispose(),this.node.remove()}_closeDetails(){let e=this._selected,t=this._details?.node.contains(document.activeElement);this.select(-1),t&&this._grid?.focus(e)}_told(e){this._store.meshes.has(this._mesh)&&(this._seen=this._store.now()),this._pending=this._pending===void 0?e:this._pending&&oi(this._pending,e),this._frame.request()}_apply(){let e=this._pending;if(this._pending=void 0,e===void 0)return;(!e||e.structure)&&(this._chooseMesh(),this._showMeshes());let t=this._store.meshes.get(this._mesh);if(p(this.node,"data-ended",!!this._mesh&&!t),this._content.hidden=!this._mesh,this._empty.hidden=!!this._mesh,this._showEmpty(),!t){this._banners();return}if(!e||e.structure||e.failures||e.ranks.has(this._mesh)){let i=this._shownRanks(),s=this._store.failures.filter(n=>n.mesh===this._mesh&&this._concerns(n));this._news.update(t,i,s),this._legend.update(i)}this._grid?this._grid.update(e??void 0):(this._grid=new _e(this._main,this._store,this._mesh,this._theme,this._tooltip,i=>this.select(i===this._selected?-1:i),this._options.ranks),this._details&&this._main.append(this._details.node)),this._showModes(),this._details?.update(),this._banners()}_shownRanks(){let e=this._store.ranks(this._mesh),{ranks:t}=this._options;return t?.length?t.flatMap(i=>e[i]??[]):e}_concerns(e){let{ranks:t}=this._options;return!t?.length||!e.ranks.length||e.ranks.some(i=>t.includes(i))}_showEmpty(){let{mesh:e,record:t}=this._options,i=this._store.version>=0;if(i&&e&&t){if(!this._empty.querySelector(".mk-Record")){let n=l("This mesh has ended. This is its state when the cell ran.");this._empty.replaceChildren(n,h("pre","mk-Record",{},t))}return}let s=e?l("This mesh has ended."):l("No mesh yet. %mesh up starts one.");f(this._empty,i?s:l("Waiting for the kernel \u2026"))}_chooseMesh(){let{meshes:e}=this._store,t=this._options.mesh;if(t!==void 0){this._mesh=e.has(t)?t:this._mesh;return}if(e.has(this._mesh)||this._mesh&&!e.size)return;let i=[...e.values()].find(s=>s.current)??e.values().next().value;i&&(this._mesh&&this.select(-1),this._mesh=i.key,this._grid?.dispose(),this._grid=void 0)}_showMeshes(){let e=this._options.mesh===void 0?[...this._store.meshes.values()]:[];this._meshes.hidden=e.length<2,p(this._meshes,"aria-label",l("Meshes"));let t=new Map([...this._meshes.children].map(i=>[i.dataset.mesh,i]));this._meshes.replaceChildren(...e.map(i=>{let s=t.get(i.key)??g("mk-Tab","",()=>this.showMesh(i.key),{role:"tab","data-mesh":i.key});return f(s,i.name),p(s,"aria-selected",String(i.key===this._mesh)),s.tabIndex=i.key===this._mesh?0:-1,s}))}_showModes(){let e=this._grid;this._modes.hidden=!e?.hasModes,p(this._hostsMode,"aria-pressed",String(e?.mode==="hosts")),p(this._cellsMode,"aria-pressed",String(e?.mode==="cells"))}_setMode(e){this._grid?.setMode(e),this._grid?.select(this._selected),this._showModes()}_next(e){let t=this._shownRanks().filter(s=>e==="older"?s.older:s.state===e),i=t.find(s=>s.rank>this._selected)??t[0];i&&this.select(i.rank)}_tick(){document.visibilityState==="hidden"||this.node.hasAttribute("data-gone")||(this._grid?.tick(),this._details?.update(),this._news.tick())}_fit(){p(this.node,"data-wide",this.node.clientWidth>=640)}_connected(e){p(this.node,"data-gone",e==="gone"),this._banners()}_banners(){let e=this.node.hasAttribute("data-gone"),t=this.node.hasAttribute("data-ended");if(this._banner.hidden=!e&&!t,e){let i=l("The kernel has gone. This is the last state, of %1.",Te(this._seen));f(this._banner,this._mesh?i:l("The kernel has gone."))}else t&&f(this._banner,l("This mesh has ended. This is its last state, of %1.",Te(this._seen)));this._banner.replaceChildren(C("ended"),this._banner.textContent??"")}};function oi(o,e){let t=new Map([...o.ranks].map(([i,s])=>[i,new Set(s)]));for(let[i,s]of e.ranks){let n=t.get(i)??new Set;s.forEach(r=>n.add(r)),t.set(i,n)}return{structure:o.structure||e.structure,failures:o.failures||e.failures,ranks:t}}var H=56,W=34,X=10,Ge=22,ri=[1,2,5,10,15,30,60,120,300,600,900,1800,3600,7200,14400,43200,86400],ft=8,Z=class{node=h("div","mk-Chart");series=new re;_title=h("div","mk-Chart-title");_news=h("div","mk-Chart-news",{role:"status"});_said=h("div","mk-Chart-said",{role:"status"});_area=h("div","mk-Chart-area",{tabindex:0,role:"img"});_canvas=h("canvas","mk-Chart-canvas");_readout=h("div","mk-Chart-readout");_context;_disposables=new y;_frame=new N(()=>this._draw());_theme;_width=0;_height=0;_cross=-1;_pointer=-1;_isOver=!1;constructor(e,t,i,s){this.node.classList.add("mk-View"),f(this._title,t),this._context=this._canvas.getContext("2d"),this._area.append(this._canvas),this.node.append(this._title,this._news,this._area,this._readout,this._said),e.append(this.node),this._theme=new B(this.node,()=>this._frame.request()),this._disposables.listen(this._area,"pointermove",n=>this._moved(n)),this._disposables.listen(this._area,"pointerleave",()=>this._setCross(-1)),this._disposables.listen(this._area,"keydown",n=>this._keyed(n)),this._disposables.listen(this._area,"blur",()=>this._setCross(-1)),this._disposables.add($(this._area,()=>this._frame.request())),i&&s&&this._follow(i,s),this.update()}push(e,t){this.series.push(e,t),this.update()}setGone(e){p(this.node,"data-gone",e),this._setOver(e),this._say(e?l("The kernel has gone. These are the last values."):"")}update(){let t=this.series.outliers().map(({rank:r,value:a})=>a===null?l("rank %1: no finite number",r):l("rank %1: %2",r,V(a))),i=this.series.spreads.at(-1),s=i&&Number.isFinite(i.middle)?l("median %1",V(i.middle)):"";f(this._news,t.length?t.join(" \xB7 "):s),p(this._news,"data-bad",t.length>0);let n=this.series.ranks;p(this._area,"aria-label",[this._title.textContent,n.length?F(n):l("no values yet"),s,...t].join(", ")),this._frame.request()}dispose(){this._frame.cancel(),this._disposables.dispose(),this._theme.dispose(),this.node.remove()}_follow(e,t){let i=e.plot(t,({time:s,values:n,error:r,ended:a})=>{n.length&&this.push(s,n),(r!==void 0||a)&&this._say(r||(a?l("The plot has ended."):"")),this._setOver(a??!1)},s=>this._say([s.message,s.hint].filter(Boolean).join(" ")));this._disposables.add(i)}_setOver(e){this._isOver=e,this._frame.request()}_say(e){T(this._said,e)}_moved(e){let t=this._area.getBoundingClientRect();this._pointer=e.clientY-t.top;let{times:i}=this.series,s=this._scale(),n=s.from+(e.clientX-t.left-H)/(s.width-H-W)*(s.to-s.from),r=-1;i.forEach((a,d)=>{(r<0||Math.abs(a-n)<Math.abs((i[r]??0)-n))&&(r=d)}),this._setCross(r)}_keyed(e){let t={ArrowLeft:-1,ArrowRight:1}[e.key];if(t&&this.series.times.length){e.preventDefault(),this._pointer=-1;let i=this._cross<0?this.series.times.length-1:this._cross+t;this._setCross(Math.min(this.series.times.length-1,Math.max(0,i)))}}_setCross(e){this._cross=e,this._frame.request()}_scale(){let{times:e,spreads:t}=this.series,i=1/0,s=-1/0;for(let m of t)i=m.low<i?m.low:i,s=m.high>s?m.high:s;i>s&&([i,s]=[0,1]);let n=i===s?Math.abs(i)*.1||1:0,r=Ee(i-n,s+n,4),a=(r[1]??1)-(r[0]??0)||1,d=e.at(-1)??0;return{width:this._width,height:this._height,from:Math.min(e[0]??0,d-10),to:d,low:Math.floor((i-n)/a+1e-9)*a,high:Math.ceil((s+n)/a-1e-9)*a}}_draw(){let e=this._context;if(this._width=this._area.clientWidth,this._height=this._area.clientHeight,!e||!this._width)return;let t=window.devicePixelRatio||1,[i,s]=[Math.round(this._width*t),Math.round(this._height*t)];(this._canvas.width!==i||this._canvas.height!==s)&&(this._canvas.width=i,this._canvas.height=s),e.setTransform(t,0,0,t,0,0),e.clearRect(0,0,this._width,this._height);let n=this._scale(),r=d=>H+(d-n.from)/(n.to-n.from)*(n.width-H-W),a=d=>X+(1-(d-n.low)/(n.high-n.low))*(n.height-X-Ge);this._drawAxes(e,n,r,a),e.save(),e.beginPath(),e.rect(H,X-2,n.width-H-W+2,n.height-X-Ge+4),e.clip(),this._drawLines(e,r,a),e.restore(),this._drawNames(e,a),this._drawCross(e,n,r,a)}_drawAxes(e,t,i,s){let{line:n,faint:r,font:a}=this._theme.palette;e.font=`11px ${a}`,e.lineWidth=1,e.strokeStyle=n,e.fillStyle=r,e.textAlign="right",e.textBaseline="middle";for(let c of Ee(t.low,t.high,4)){let u=Math.round(s(c))+.5;e.beginPath(),e.moveTo(H,u),e.lineTo(t.width-W,u),e.stroke(),e.fillText(V(c),H-6,u)}e.textBaseline="alphabetic";let d=t.to-t.from,m=ri.find(c=>c/d*(t.width-H-W)>=90)??d;for(let c=0;c<=d;c+=m){let u=i(t.to-c);e.textAlign=c===0?"right":u<H+24?"left":"center",e.fillText(c>0?`\u2212${ai(c)}`:this._isOver?l("end"):l("now"),c===0?u+W-4:u,t.height-6)}}_drawLines(e,t,i){let{series:s}=this,{lines:n,faint:r,states:a}=this._theme.palette,d=new Set(s.outliers().map(({rank:_})=>_)),m=this._cross>=0&&this._pointer>=0?this._nearest(i):-1,c=(_,v,b,R)=>{e.strokeStyle=v,e.lineWidth=b,e.globalAlpha=R,e.beginPath();let E=!1;s.times.forEach((J,j)=>{let M=_(j);Number.isFinite(M)&&(E?e.lineTo(t(J),i(M)):e.moveTo(t(J),i(M))),E=Number.isFinite(M)}),e.stroke(),e.globalAlpha=1};e.lineJoin="round";let u=_=>v=>s.values.get(_)?.[v]??NaN,k=s.ranks;if(d.forEach(_=>c(u(_),a.dead,1.75,1)),s.isBand){let _=s.spreads.flatMap((v,b)=>Number.isFinite(v.low)?[b]:[]);e.fillStyle=n[0]??r,e.globalAlpha=.2,e.beginPath(),_.forEach(v=>e.lineTo(t(s.times[v]??0),i(s.spreads[v]?.high??0))),_.reverse().forEach(v=>e.lineTo(t(s.times[v]??0),i(s.spreads[v]?.low??0))),e.fill(),c(v=>s.spreads[v]?.middle??NaN,n[0]??r,2,1)}else k.forEach((_,v)=>{if(!d.has(_)){let b=k.length<=ft;c(u(_),n[b?v%n.length:0]??r,b?1.75:1,b?1:.45)}});m>=0&&c(u(m),this._theme.palette.text,2,1)}_drawNames(e,t){let{lines:i,faint:s,states:n,font:r}=this._theme.palette,a=new Set(this.series.outliers().map(({rank:u})=>u)),d=this.series.ranks,m=d.length<=ft;e.font=`11px ${r}`,e.textAlign="left",e.textBaseline="middle";let c=[];for(let u of[...a,...m?d:[]]){let k=t(this.series.values.get(u)?.at(-1)??NaN);if(Number.isFinite(k)&&c.every(_=>Math.abs(_-k)>=11)){c.push(k);let _=i[d.indexOf(u)%i.length]??s;e.fillStyle=a.has(u)?n.dead:_,e.fillText(String(u),this._width-W+5,k)}}}_nearest(e){let t=-1,i=14;for(let[s,n]of this.series.values){let r=Math.abs(e(n[this._cross]??NaN)-this._pointer);r<i&&(t=s,i=r)}return t}_drawCross(e,t,i,s){let n=this.series.times[this._cross],r=this.series.spreads[this._cross];if(n===void 0||!r){f(this._readout,"");return}let a=Math.round(i(n))+.5;e.strokeStyle=this._theme.palette.faint,e.setLineDash([3,3]),e.beginPath(),e.moveTo(a,X),e.lineTo(a,t.height-Ge),e.stroke(),e.setLineDash([]);let d=this._pointer>=0?this._nearest(s):-1,m=this.series.values.get(d)?.[this._cross],c=(this.series.times.at(-1)??n)-n,u=c<1?A(c):L(c),k=this._isOver?c>0?l("%1 before the end",u):l("at the end"):c>0?l("%1 ago",u):l("now"),_=[d>=0&&m!==void 0?l("rank %1: %2",d,V(m)):"",k,Number.isFinite(r.low)?l("min %1 \xB7 median %2 \xB7 max %3",V(r.low),V(r.middle),V(r.high)):l("no numbers")];f(this._readout,_.filter(Boolean).join(" \xB7 "))}};function ai(o){return o>=3600&&o%3600===0?l("%1 h",o/3600):o>=60&&o%60===0?l("%1 min",o/60):L(o)}var _t=[["same",0],["within",Number.MIN_VALUE],["mild",1],["much",10],["most",1e3]],ee=class{constructor(e,t){this._data=t;let i=h("div","mk-Comparison-verdict",{},t.sentence);p(i,"data-bad",t.equal===!1),this._scroll.append(this._table());let s=g("mk-Button mk-Details-close","\xD7",()=>this._choose(void 0,!0),{"aria-label":l("Close")});this._details.append(h("div","mk-Details-head",{},this._title,s),this._tensors);let n=t.notes.map(d=>h("div","mk-Note",{},d));this.node.append(i,this._legend(),this._scroll,this._details,...n),e.append(this.node),this._theme=new B(this.node,()=>{}),this._disposables.listen(this.node,"keydown",d=>this._keyed(d));let[r=0,a=0]=t.first??[];this._start=this._buttons[r]?.[a]??this._all()[0],this._start&&(this._start.tabIndex=0)}_data;node=h("div","mk-View mk-Comparison");_scroll=h("div","mk-Comparison-scroll");_details=h("section","mk-Comparison-details",{hidden:!0});_title=h("div","mk-Comparison-title");_tensors=h("div","mk-Comparison-tensors",{tabindex:0,role:"region"});_buttons=[];_disposables=new y;_theme;_chosen;_start;refresh(){this._theme.refresh();let{_start:e,_scroll:t}=this;e&&t.clientHeight&&(t.scrollTop=Math.max(0,e.offsetTop-t.clientHeight/2),t.scrollLeft=Math.max(0,e.offsetLeft-t.clientWidth/2),this._start=void 0)}dispose(){this._disposables.dispose(),this._theme.dispose(),this.node.remove()}_legend(){let e={same:l("the same bytes"),within:l("within tolerance"),mild:l("up to 10 times the tolerance"),much:l("up to 1,000 times"),most:l("more")},t=h("div","mk-Comparison-legend");for(let[i]of _t){let s=h("span","mk-Comparison-box",{"data-level":i,"aria-hidden":"true"});t.append(h("span","",{},s,e[i]))}return t}_table(){let{modules:e,steps:t,cells:i}=this._data,s=h("tr","",{},h("th","",{scope:"col"},l("module \\ step")));t.forEach(a=>s.append(h("th","",{scope:"col"},String(a))));let n=h("tbody");e.forEach((a,d)=>{let m=h("th","",{scope:"row"});T(m,a||l("(the model)")),n.append(h("tr","",{},m,...t.map(()=>h("td")))),this._buttons[d]=[]});for(let a of i){let d=n.rows[a.row]?.cells[a.column+1],m=this._cell(a);d?.append(m),(this._buttons[a.row]??=[])[a.column]=m}let r=l("Modules and steps, by the ratio to the tolerance");return h("table","mk-Comparison-grid",{"aria-label":r},h("thead","",{},s),n)}_cell(e){let t=e.ratio??1/0,i=_t.filter(([,d])=>t>=d).at(-1)?.[0]??"same",s=e.row===this._data.first?.[0]&&e.column===this._data.first[1],n=g("mk-Comparison-cell",t>1?je(t):"",()=>this._toggle(n,e),{"data-level":i,"data-first":s,"aria-pressed":"false",tabindex:-1}),a=[`${this._nameOf(e)}: ${di(e.ratio)}`,s?l("the first wrong tensor"):""].filter(Boolean).join(", ");return p(n,"aria-label",a),p(n,"title",a),n}_nameOf({row:e,column:t}){let{modules:i,steps:s}=this._data;return l("%1, step %2",i[e]||l("the model"),s[t]??"")}_toggle(e,t){if(e===this._chosen){this._choose(void 0,!0);return}this._choose(e,!1),f(this._title,this._nameOf(t)),p(this._details,"aria-label",this._nameOf(t)),p(this._tensors,"aria-label",l("Tensors of %1",this._nameOf(t)));let i=t.more?x("and %1 more tensor that is closer","and %1 more tensors that are closer",t.more):"";this._tensors.replaceChildren(...t.tensors.length?[li(t.tensors)]:[],h("div","mk-Faint",{},i))}_choose(e,t){let i=this._chosen;i&&(p(i,"aria-pressed","false"),t&&this._moveTo(i)),this._chosen=e,this._details.hidden=!e,e&&(p(e,"aria-pressed","true"),this._moveTo(e))}_all(){return this._buttons.flatMap(e=>e.filter(t=>t!==void 0))}_moveTo(e){this._all().forEach(t=>t.tabIndex=t===e?0:-1),e.focus()}_keyed(e){if(e.key==="Escape"&&this._chosen){e.preventDefault(),e.stopPropagation(),this._choose(void 0,!0);return}let t=this._buttons.findIndex(n=>n.includes(e.target)),i=this._buttons[t]?.indexOf(e.target)??-1,s=t<0?void 0:this._target(e.key,t,i);s&&(e.preventDefault(),e.stopPropagation(),this._moveTo(s))}_target(e,t,i){let s=this._buttons[t]??[],n=this._buttons.map(r=>r[i]);switch(e){case"ArrowRight":return s.slice(i+1).find(Boolean);case"ArrowLeft":return s.slice(0,i).filter(Boolean).at(-1);case"ArrowDown":return n.slice(t+1).find(Boolean);case"ArrowUp":return n.slice(0,t).filter(Boolean).at(-1);case"Home":return s.find(Boolean);case"End":return s.filter(Boolean).at(-1);default:return}}};function li(o){let e=[l("phase"),l("tensor"),l("ranks"),l("line"),l("\xD7 tolerance"),l("suggests")],t=h("tbody");for(let s of o){let n=o.some(m=>m.micro!==s.micro)?l(" of micro-batch %1",s.micro):"",r=s.consequence?l("a consequence"):s.suggests,a=[s.phase,s.title+n,s.ranks,s.line,je(s.ratio??1/0),r],d=h("tr","",{},...a.map(m=>h("td","",{},m)));p(d,"data-wrong",(s.ratio??1/0)>1),t.append(d)}let i=h("tr","",{},...e.map(s=>h("th","",{scope:"col"},s)));return h("table","mk-Comparison-table",{},h("thead","",{},i),t)}function je(o){return Number.isFinite(o)?o>=1e4?o.toExponential(0):V(Number(o.toPrecision(2))):"\u221E"}function di(o){return o===null?l("rounding explains no difference"):o?l("%1 \xD7 tolerance",je(o)):l("the same bytes")}var kt=`/* Views of a mesh. Colours follow JupyterLab's variables, then VS Code's, then the colour behind the view, which
   data-mk-theme tells. Sizes do not depend on the numbers that change. */

.mk-View {
  --mk-text: var(--jp-content-font-color1, var(--vscode-foreground, #1f2328));
  --mk-faint: var(--jp-content-font-color2, var(--vscode-descriptionForeground, #59636e));
  --mk-surface: var(--jp-layout-color1, var(--vscode-editor-background, #ffffff));
  --mk-raised: var(--jp-layout-color2, var(--vscode-editorWidget-background, #f3f4f6));
  --mk-line: var(--jp-border-color2, var(--vscode-panel-border, #d8dee4));
  --mk-track: var(--jp-border-color3, #eaeef2);
  --mk-focus: var(--jp-brand-color1, var(--vscode-focusBorder, #0969da));
  --mk-mark: #ffe58a;
  --mk-on: #ffffff;
  --mk-dead: #cf222e;
  --mk-unresponsive: #8250df;
  --mk-stopped: #9a6700;
  --mk-healing: #0f7b6c;
  --mk-starting: #59636e;
  --mk-running: #1f6feb;
  --mk-idle: #8c959f;
  --mk-ended: #8c959f;
  --mk-line-1: #1f6feb;
  --mk-line-2: #d9730d;
  --mk-line-3: #0f7b6c;
  --mk-line-4: #c2388f;
  --mk-line-5: #6e5bd6;
  --mk-line-6: #8a6d00;
  --mk-line-7: #0b86a8;
  --mk-line-8: #59636e;
  --mk-same: rgb(128 128 128 / 18%);
  --mk-within: rgb(43 127 217 / 30%);
  --mk-mild: #f0c64a;
  --mk-much: #e98b45;
  --mk-most: #cf222e;
  --mk-most-on: #ffffff;
  --mk-mild-on: #1f2328;
  --mk-mono: var(--jp-code-font-family, ui-monospace, SFMono-Regular, Menlo, Consolas, monospace);

  position: relative;
  box-sizing: border-box;
  color: var(--mk-text);
  font-family: var(--jp-ui-font-family, system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif);
  font-size: var(--jp-ui-font-size1, 13px);
  line-height: 1.4;
  font-variant-numeric: tabular-nums;
}

.mk-View[data-mk-theme='dark'] {
  --mk-text: var(--jp-content-font-color1, var(--vscode-foreground, #e6edf3));
  --mk-faint: var(--jp-content-font-color2, var(--vscode-descriptionForeground, #9aa4af));
  --mk-surface: var(--jp-layout-color1, var(--vscode-editor-background, #0f1216));
  --mk-raised: var(--jp-layout-color2, var(--vscode-editorWidget-background, #1c2128));
  --mk-line: var(--jp-border-color2, var(--vscode-panel-border, #363d46));
  --mk-track: var(--jp-border-color3, #262c34);
  --mk-focus: var(--jp-brand-color1, var(--vscode-focusBorder, #4493f8));
  --mk-mark: #7a5d00;
  --mk-on: #0b0e12;
  --mk-dead: #ff6a69;
  --mk-unresponsive: #b18cff;
  --mk-stopped: #e3a21a;
  --mk-healing: #3cc9b4;
  --mk-starting: #9aa4af;
  --mk-running: #5aa2ff;
  --mk-idle: #7d8792;
  --mk-ended: #7d8792;
  --mk-line-1: #5aa2ff;
  --mk-line-2: #ff9a4d;
  --mk-line-3: #3cc9b4;
  --mk-line-4: #f778ba;
  --mk-line-5: #a898ff;
  --mk-line-6: #d7b64a;
  --mk-line-7: #4cc9ec;
  --mk-line-8: #9aa4af;
  --mk-mild: #d7b64a;
  --mk-much: #f0884a;
  --mk-most: #ff6a69;
  --mk-most-on: #0b0e12;
  --mk-mild-on: #0b0e12;
}

@media (prefers-contrast: more) {
  .mk-View,
  .mk-View[data-mk-theme='dark'] {
    --mk-faint: var(--mk-text);
    --mk-line: var(--mk-text);
    --mk-idle: var(--mk-text);
    --mk-ended: var(--mk-text);
    --mk-starting: var(--mk-text);
  }
}

[data-jp-theme-name*='High Contrast'] .mk-View {
  --mk-faint: var(--mk-text);
  --mk-line: var(--mk-text);
  --mk-idle: var(--mk-text);
  --mk-ended: var(--mk-text);
  --mk-starting: var(--mk-text);
}

@media (forced-colors: active) {
  .mk-View,
  .mk-View[data-mk-theme='dark'] {
    --mk-text: CanvasText;
    --mk-faint: CanvasText;
    --mk-surface: Canvas;
    --mk-raised: Canvas;
    --mk-line: CanvasText;
    --mk-track: Canvas;
    --mk-focus: Highlight;
    --mk-on: Canvas;
    --mk-dead: CanvasText;
    --mk-unresponsive: CanvasText;
    --mk-stopped: CanvasText;
    --mk-healing: CanvasText;
    --mk-starting: CanvasText;
    --mk-running: Highlight;
    --mk-idle: GrayText;
    --mk-ended: GrayText;
  }

  .mk-View .mk-Icon,
  .mk-View .mk-Meter {
    forced-color-adjust: none;
  }

  .mk-View .mk-Button[aria-pressed='true'],
  .mk-View .mk-Tab[aria-selected='true'] {
    background: Highlight;
    color: HighlightText;
    forced-color-adjust: none;
  }
}

.mk-View *,
.mk-View *::before {
  box-sizing: border-box;
}

.mk-View [hidden] {
  display: none !important;
}

.mk-View button,
.mk-View input {
  margin: 0;
  font: inherit;
  color: inherit;
}

.mk-View button {
  border: 0;
  padding: 0;
  background: none;
  text-align: start;
  cursor: pointer;
}

.mk-View button:disabled {
  cursor: default;
}

.mk-View :focus-visible {
  outline: 2px solid var(--mk-focus);
  outline-offset: 1px;
}

.mk-Spoken {
  position: absolute;
  width: 1px;
  height: 1px;
  overflow: hidden;
  clip-path: inset(50%);
  white-space: nowrap;
}

/* ---- parts that are used in several places */

.mk-View .mk-Button {
  flex: none;
  min-height: 24px;
  padding: 1px 8px;
  border: 1px solid var(--mk-line);
  border-radius: 4px;
  background: var(--mk-surface);
  white-space: nowrap;
}

.mk-View .mk-Button:hover:not(:disabled) {
  background: var(--mk-raised);
}

.mk-View .mk-Button:disabled {
  opacity: 0.45;
}

.mk-View .mk-Button[aria-pressed='true'] {
  border-color: var(--mk-focus);
  box-shadow: inset 0 0 0 1px var(--mk-focus);
}

.mk-View .mk-Input {
  min-width: 0;
  height: 24px;
  padding: 1px 6px;
  border: 1px solid var(--mk-line);
  border-radius: 4px;
  background: var(--mk-surface);
}

.mk-View .mk-Input[aria-invalid] {
  border-color: var(--mk-dead);
}

.mk-Icon {
  flex: none;
  width: 14px;
  height: 14px;
  color: var(--mk-state);
}

.mk-View [data-state='dead'] {
  --mk-state: var(--mk-dead);
}

.mk-View [data-state='unresponsive'],
.mk-View [data-state='hang'],
.mk-View [data-state='walltime'] {
  --mk-state: var(--mk-unresponsive);
}

.mk-View [data-state='stopped'] {
  --mk-state: var(--mk-stopped);
}

.mk-View [data-state='healing'] {
  --mk-state: var(--mk-healing);
}

.mk-View [data-state='starting'] {
  --mk-state: var(--mk-starting);
}

.mk-View [data-state='running'] {
  --mk-state: var(--mk-running);
}

.mk-View [data-state='idle'] {
  --mk-state: var(--mk-idle);
}

.mk-View [data-state='ended'] {
  --mk-state: var(--mk-ended);
}

.mk-Icon-box {
  fill: currentColor;
}

.mk-Icon-box.mk-mod-tint {
  fill-opacity: 0.3;
  stroke: currentColor;
  stroke-width: 1.4;
}

.mk-Icon-box.mk-mod-outline {
  fill-opacity: 0.08;
  stroke: currentColor;
  stroke-width: 1.4;
}

.mk-Icon-box.mk-mod-dotted {
  fill: none;
  stroke: currentColor;
  stroke-width: 1.4;
  stroke-dasharray: 2.2 2.2;
}

.mk-Icon-on {
  fill: var(--mk-on);
}

.mk-Icon-mark {
  fill: currentColor;
}

.mk-Icon-older {
  fill: var(--mk-text);
  stroke: var(--mk-surface);
}

.mk-Note,
.mk-Faint {
  color: var(--mk-faint);
}

.mk-Code,
.mk-Place {
  font-family: var(--mk-mono);
  font-size: 12px;
}

.mk-Place {
  padding: 2px 0 4px;
  color: var(--mk-faint);
  overflow-wrap: anywhere;
}

.mk-Refusal {
  padding: 6px 8px;
  border-inline-start: 3px solid var(--mk-dead);
  background: var(--mk-raised);
  overflow-wrap: anywhere;
}

.mk-Tabs {
  display: flex;
  gap: 2px;
  overflow-x: auto;
  scrollbar-width: none;
  border-bottom: 1px solid var(--mk-line);
}

.mk-View .mk-Tab {
  flex: none;
  min-height: 28px;
  padding: 3px 10px;
  border-bottom: 2px solid transparent;
  color: var(--mk-faint);
}

.mk-View .mk-Tab:hover {
  color: var(--mk-text);
}

.mk-View .mk-Tab[aria-selected='true'] {
  border-bottom-color: var(--mk-focus);
  color: var(--mk-text);
}

.mk-View .mk-Tab:focus-visible {
  outline-offset: -2px;
}

.mk-View .mk-Table {
  width: 100%;
  margin: 0;
  border: 0;
  border-collapse: collapse;
  table-layout: fixed;
  font-size: inherit;
}

.mk-View .mk-Table tr {
  border: 0;
  background: none;
}

.mk-View .mk-Table th,
.mk-View .mk-Table td {
  max-width: none;
  padding: 3px 8px 3px 0;
  border: 0;
  border-bottom: 1px solid var(--mk-line);
  overflow: hidden;
  text-align: start;
  text-overflow: ellipsis;
  vertical-align: top;
  white-space: nowrap;
  font-weight: normal;
}

.mk-View .mk-Table thead th {
  color: var(--mk-faint);
}

.mk-View .mk-Variables th {
  width: 28%;
}

.mk-View .mk-Variables td:nth-child(2) {
  width: 20%;
}

.mk-View .mk-Table .mk-mod-number {
  width: 58px;
  padding-right: 0;
  text-align: end;
}

/* ---- the board */

.mk-Board {
  display: flex;
  flex-direction: column;
  gap: 8px;
  min-width: 160px;
  padding: 4px 2px;
}

.mk-Board[data-gone] .mk-Board-content,
.mk-Board[data-ended] .mk-Board-content {
  opacity: 0.5;
}

.mk-Banner {
  display: flex;
  gap: 6px;
  align-items: center;
  padding: 4px 8px;
  border-inline-start: 3px solid var(--mk-faint);
  background: var(--mk-raised);
}

.mk-Board-content {
  display: flex;
  flex-direction: column;
  gap: 8px;
  min-width: 0;
}

.mk-Board-bar {
  display: flex;
  flex-wrap: wrap;
  gap: 8px;
  align-items: center;
  justify-content: space-between;
}

.mk-Board-main {
  display: flex;
  flex-direction: column;
  gap: 12px;
  min-width: 0;
}

.mk-Board[data-wide] .mk-Board-main {
  flex-direction: row;
}

.mk-Board-main > .mk-Grid {
  flex: 1 1 0;
  min-width: 0;
}

.mk-Board[data-wide] .mk-Details {
  flex: 0 0 min(380px, 45%);
}

.mk-Modes {
  display: flex;
  flex: none;
}

.mk-View .mk-Modes .mk-Button:first-child {
  border-radius: 4px 0 0 4px;
}

.mk-View .mk-Modes .mk-Button:last-child {
  margin-inline-start: -1px;
  border-radius: 0 4px 4px 0;
}

/* ---- news */

.mk-News {
  min-width: 0;
}

.mk-News-headline {
  display: flex;
  gap: 8px;
  align-items: baseline;
  min-width: 0;
  font-size: 15px;
  white-space: nowrap;
}

.mk-News-name {
  flex: 0 1 auto;
  min-width: 2ch;
  max-width: 40%;
  overflow: hidden;
  font-weight: 600;
  text-overflow: ellipsis;
}

.mk-News-count {
  flex: none;
  color: var(--mk-faint);
}

.mk-News-news {
  flex: 1 1 0;
  min-width: 0;
  overflow: hidden;
  text-overflow: ellipsis;
}

.mk-News-headline[data-state='dead'] .mk-News-news,
.mk-News-headline[data-state='unresponsive'] .mk-News-news,
.mk-News-headline[data-state='hang'] .mk-News-news,
.mk-News-headline[data-state='walltime'] .mk-News-news,
.mk-News-headline[data-state='stopped'] .mk-News-news,
.mk-News-headline[data-state='healing'] .mk-News-news {
  color: var(--mk-state);
  font-weight: 600;
}

.mk-News-strip {
  display: flex;
  gap: 8px;
  align-items: center;
  height: 30px;
  margin-top: 4px;
}

.mk-View .mk-News-worst {
  display: flex;
  flex: 1 1 0;
  gap: 6px;
  align-items: center;
  height: 28px;
  min-width: 0;
  padding: 0 8px;
  border-inline-start: 3px solid transparent;
  border-radius: 2px;
}

.mk-View .mk-News-worst:disabled {
  padding-inline-start: 0;
  border: 0;
  color: var(--mk-faint);
}

.mk-View .mk-News-worst[data-state] {
  padding-inline-start: 8px;
  border-inline-start: 3px solid var(--mk-state);
  background: var(--mk-raised);
  color: var(--mk-text);
}

.mk-News-icon:empty {
  display: none;
}

.mk-News-icon {
  display: flex;
}

.mk-News-text {
  min-width: 0;
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-View .mk-News-more {
  min-width: 64px;
  text-align: center;
}

.mk-View .mk-News-more[data-empty] {
  visibility: hidden;
}

.mk-News-list {
  max-height: 156px;
  margin: 4px 0 0;
  padding: 0;
  overflow-y: auto;
  list-style: none;
}

.mk-View .mk-News-line {
  display: flex;
  gap: 6px;
  align-items: center;
  width: 100%;
  min-height: 24px;
  padding: 0 8px;
}

.mk-View .mk-News-line:hover {
  background: var(--mk-raised);
}

.mk-View .mk-News-line:focus-visible {
  outline-offset: -2px;
}

.mk-View .mk-News-line:not([data-state]) {
  color: var(--mk-faint);
}

/* ---- legend */

.mk-Legend {
  display: flex;
  flex: 1 1 0;
  flex-wrap: wrap;
  gap: 2px 4px;
  min-width: 0;
}

.mk-View .mk-Legend-chip {
  display: flex;
  gap: 5px;
  align-items: center;
  min-height: 24px;
  padding: 0 6px 0 2px;
  border-radius: 4px;
}

.mk-View .mk-Legend-chip:hover {
  background: var(--mk-raised);
}

.mk-Legend-count {
  min-width: var(--mk-digits, 1ch);
}

.mk-Legend-name {
  min-width: 0;
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Board:not([data-wide]) .mk-Legend-count {
  min-width: 0;
}

.mk-Board:not([data-wide]) .mk-Legend {
  display: grid;
  flex-basis: 100%;
  grid-template-columns: repeat(auto-fill, minmax(min(126px, 100%), 1fr));
}

.mk-Board[data-wide] .mk-News-news:not(:empty)::before {
  content: '\xB7 ';
  color: var(--mk-faint);
  font-weight: normal;
}

.mk-Board:not([data-wide]) .mk-News-headline {
  flex-wrap: wrap;
  gap: 0 8px;
}

.mk-Board:not([data-wide]) .mk-News-news {
  flex-basis: 100%;
  min-height: 1.4em;
}

.mk-Board:not([data-wide]) .mk-News-strip,
.mk-Board:not([data-wide]) .mk-News-worst {
  height: 44px;
}

.mk-Board:not([data-wide]) .mk-News-worst .mk-News-text {
  display: -webkit-box;
  line-height: 1.3;
  white-space: normal;
  -webkit-box-orient: vertical;
  -webkit-line-clamp: 2;
}

.mk-Board:not([data-wide]) .mk-Tab {
  padding-inline: 5px;
}

.mk-View .mk-Legend-chip[data-none] {
  opacity: 0.45;
}

.mk-View .mk-Legend-chip[data-trouble] {
  font-weight: 600;
}

/* ---- grid */

.mk-Grid-path {
  display: none;
  gap: 8px;
  align-items: center;
  margin-bottom: 6px;
}

.mk-Grid[data-zoomed='true'] .mk-Grid-path {
  display: flex;
}

.mk-Grid-place {
  overflow: hidden;
  font-weight: 600;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-View .mk-Grid-back::before {
  content: '\u2039 ';
}

.mk-Cells {
  max-height: var(--mk-grid-height, 420px);
  padding: 2px;
  overflow: hidden auto;
  overscroll-behavior: auto;
  scrollbar-gutter: stable;
  contain: content;
}

.mk-Cells:focus {
  outline: none;
}

.mk-Cells-space {
  position: relative;
  cursor: pointer;
}

.mk-Cells-canvas {
  position: sticky;
  top: 0;
  display: block;
  pointer-events: none;
}

.mk-Cells-hover,
.mk-Cells-selection,
.mk-View .mk-Cells-stop {
  position: absolute;
  top: 0;
  left: 0;
  border-radius: 4px;
  pointer-events: none;
}

.mk-Cells-hover {
  box-shadow: 0 0 0 1px var(--mk-faint);
}

.mk-Cells-selection {
  box-shadow:
    0 0 0 1px var(--mk-surface),
    0 0 0 3px var(--mk-focus);
}

.mk-Cards {
  display: grid;
  grid-template-columns: repeat(auto-fill, minmax(128px, 1fr));
  gap: 6px;
  padding: 2px;
}

.mk-Board[data-wide]:not([data-details]) .mk-Cards {
  grid-template-columns: repeat(auto-fill, minmax(190px, 1fr));
}

.mk-Cards-host {
  grid-column: 1 / -1;
  min-width: 0;
  overflow: hidden;
  color: var(--mk-faint);
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Cards-host:not(:first-child) {
  margin-top: 4px;
}

.mk-View .mk-Card {
  display: flex;
  flex-direction: column;
  gap: 1px;
  height: 68px;
  min-width: 0;
  padding: 5px 8px;
  border: 1px solid var(--mk-line);
  border-radius: 5px;
  background: var(--mk-surface);
}

.mk-View .mk-Card:hover {
  border-color: var(--mk-faint);
}

.mk-View .mk-Card[data-state='dead'],
.mk-View .mk-Card[data-state='unresponsive'],
.mk-View .mk-Card[data-state='stopped'],
.mk-View .mk-Card[data-state='healing'] {
  border-color: var(--mk-state);
  box-shadow: inset 3px 0 0 var(--mk-state);
}

.mk-View .mk-Card[aria-pressed='true'] {
  outline: 2px solid var(--mk-focus);
  outline-offset: 1px;
}

.mk-Card-head {
  display: flex;
  gap: 6px;
  align-items: center;
  min-width: 0;
}

.mk-Card-rank {
  font-weight: 600;
}

.mk-Card-state,
.mk-Card-facts {
  color: var(--mk-faint);
}

.mk-Card-doing {
  display: flex;
  gap: 1ch;
  justify-content: space-between;
}

.mk-Card-time {
  flex: none;
  color: var(--mk-faint);
}

/* Why a rank is in trouble has the room of the facts, too. */
.mk-View .mk-Card[data-reason] .mk-Card-doing {
  display: block;
  height: 2.8em;
  white-space: normal;
}

.mk-Card[data-reason] .mk-Card-what {
  display: -webkit-box;
  white-space: normal;
  -webkit-box-orient: vertical;
  -webkit-line-clamp: 2;
}

.mk-Card[data-reason] .mk-Card-facts {
  display: none;
}

.mk-Card-state,
.mk-Card-what,
.mk-Card-doing,
.mk-Card-facts {
  min-width: 0;
  min-height: 1.4em;
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Card-doing,
.mk-Card-facts {
  font-size: 12px;
}

/* ---- tooltip */

.mk-Tooltip {
  position: absolute;
  z-index: 20;
  top: 0;
  left: 0;
  max-width: min(360px, calc(100% - 8px));
  padding: 6px 9px;
  border: 1px solid var(--mk-line);
  border-radius: 5px;
  background: var(--mk-raised);
  box-shadow: 0 4px 14px rgb(0 0 0 / 22%);
  font-size: 12px;
  overflow-wrap: anywhere;
  pointer-events: none;
}

.mk-Tooltip-head {
  display: flex;
  gap: 6px;
  align-items: center;
}

.mk-Tooltip-title {
  font-weight: 600;
}

.mk-Tooltip-facts {
  color: var(--mk-faint);
}

/* ---- details */

.mk-Details,
.mk-Comparison-details {
  display: flex;
  flex-direction: column;
  gap: 6px;
  min-width: 0;
  padding: 8px 10px;
  border: 1px solid var(--mk-line);
  border-radius: 5px;
}

.mk-Details-head {
  display: flex;
  gap: 8px;
  align-items: center;
  min-width: 0;
}

.mk-Details-icon {
  display: flex;
}

.mk-Details-title {
  flex: 1;
  min-width: 0;
  overflow: hidden;
  font-weight: 600;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-View .mk-Details-close {
  min-width: 24px;
  padding: 0;
  border-color: transparent;
  text-align: center;
}

.mk-Details-cause {
  min-height: 1.4em;
  overflow: hidden;
  color: var(--mk-state);
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Details-deeds {
  display: flex;
  flex-wrap: wrap;
  gap: 4px;
  align-items: center;
  min-height: 26px;
}

.mk-Details-question {
  flex: 1;
}

.mk-View .mk-Button[data-sure],
.mk-View .mk-Button[data-sure]:hover:not(:disabled) {
  border-color: var(--mk-dead);
  background: var(--mk-dead);
  color: var(--mk-on);
}

.mk-View .mk-Button[data-sure]:hover:not(:disabled) {
  text-decoration: underline;
}

.mk-Details-result {
  display: -webkit-box;
  min-height: 2.8em;
  overflow: hidden;
  color: var(--mk-faint);
  overflow-wrap: anywhere;
  -webkit-box-orient: vertical;
  -webkit-line-clamp: 2;
}

.mk-Details-result:empty {
  display: none;
}

.mk-Details-result[data-failed] {
  color: var(--mk-dead);
}

.mk-Details-page {
  height: 320px;
  overflow: auto;
}

.mk-Details-page[data-tab='log'] {
  overflow: hidden;
}

.mk-Reading-row {
  display: flex;
  align-items: center;
  gap: 8px;
  margin-top: 6px;
}

.mk-Record {
  margin: 6px 0 0;
  text-align: left;
  overflow-x: auto;
}

.mk-Facts {
  display: grid;
  grid-template-columns: minmax(76px, max-content) minmax(0, 1fr);
  gap: 2px 12px;
  margin: 0 0 8px;
}

.mk-Facts dt {
  color: var(--mk-faint);
  font-weight: normal;
}

.mk-Facts dd {
  min-width: 0;
  margin: 0;
  overflow: hidden;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Stack {
  margin: 0 0 8px;
  padding: 0;
  list-style: none;
}

.mk-Stack li {
  padding: 3px 0;
  border-bottom: 1px solid var(--mk-line);
  font-family: var(--mk-mono);
  font-size: 12px;
  overflow-wrap: anywhere;
}

.mk-Stack-function {
  margin-inline-end: 1ch;
  font-weight: 600;
}

.mk-Stack-place {
  color: var(--mk-faint);
}

.mk-View .mk-Stack-text {
  display: block;
  padding: 0 0 0 2ch;
  background: none;
  color: inherit;
  font: inherit;
}

/* ---- log */

.mk-Log {
  display: flex;
  flex-direction: column;
  gap: 6px;
  height: 100%;
  min-height: 160px;
}

.mk-Log-bar {
  display: flex;
  flex-wrap: wrap;
  gap: 4px;
  align-items: center;
}

.mk-Log-bar .mk-Input[type='search'] {
  flex: 1 1 90px;
}

.mk-View .mk-Log-ranks {
  width: 72px;
}

.mk-Log-count {
  min-width: 9ch;
  color: var(--mk-faint);
  text-align: end;
  white-space: nowrap;
}

.mk-Log-scroll {
  flex: 1 1 0;
  min-height: 0;
  overflow: auto;
  border: 1px solid var(--mk-line);
  border-radius: 4px;
  contain: strict;
}

.mk-View .mk-Log-scroll:focus-visible {
  outline-offset: -2px;
}

.mk-Log-space {
  position: relative;
}

.mk-Log-line {
  position: absolute;
  top: 0;
  left: 0;
  display: flex;
  min-width: 100%;
  height: 18px;
  font-family: var(--mk-mono);
  font-size: 12px;
  line-height: 18px;
  white-space: pre;
}

.mk-Log-rank {
  position: sticky;
  left: 0;
  flex: none;
  width: 5.5ch;
  padding-inline-end: 1ch;
  background: var(--mk-surface);
  color: var(--mk-faint);
  text-align: end;
  user-select: none;
}

.mk-Log-line[data-stream='stderr'] .mk-Log-rank {
  box-shadow: inset -2px 0 0 var(--mk-dead);
}

.mk-Log-text {
  padding-inline: 1ch;
}

.mk-Log-line[data-stream='note'] .mk-Log-text {
  color: var(--mk-faint);
  font-style: italic;
}

.mk-Log-text mark {
  background: var(--mk-mark);
  color: inherit;
}

/* ---- hosts */

.mk-Hosts {
  overflow: auto;
  max-height: var(--mk-hosts-height, 420px);
}

.mk-Hosts.mk-View .mk-Table {
  min-width: 420px;
}

.mk-Hosts.mk-View .mk-Table thead th {
  position: sticky;
  z-index: 1;
  top: 0;
  background: var(--mk-surface);
}

.mk-Hosts.mk-View th:nth-child(2) {
  width: 72px;
}

.mk-Hosts tr[data-gone] {
  color: var(--mk-dead);
}

.mk-Hosts-icon {
  display: inline-block;
  margin-inline-end: 5px;
  vertical-align: -2px;
}

.mk-Meter {
  display: block;
  height: 4px;
  margin-top: 1px;
  border-radius: 2px;
  background: var(--mk-track);
  overflow: hidden;
}

.mk-Meter-text {
  display: block;
  overflow: hidden;
  text-overflow: ellipsis;
}

.mk-Meter-fill {
  display: block;
  width: 0;
  height: 100%;
  background: var(--mk-running);
}

/* ---- chart */

.mk-Chart {
  min-width: 220px;
  padding: 4px 2px;
}

.mk-Chart-title {
  overflow: hidden;
  font-family: var(--mk-mono);
  font-size: 13px;
  font-weight: 600;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Chart-news {
  height: 1.4em;
  overflow: hidden;
  color: var(--mk-faint);
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Chart-news[data-bad] {
  color: var(--mk-dead);
}

.mk-Chart-area {
  position: relative;
  height: var(--mk-chart-height, 220px);
}

.mk-Chart-canvas {
  position: absolute;
  width: 100%;
  height: 100%;
}

.mk-Chart-said {
  min-height: 1.4em;
  overflow: hidden;
  color: var(--mk-faint);
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-Chart[data-gone] .mk-Chart-area {
  opacity: 0.5;
}

.mk-Chart-readout {
  display: -webkit-box;
  height: 2.8em;
  overflow: hidden;
  font-size: 12px;
  -webkit-box-orient: vertical;
  -webkit-line-clamp: 2;
}

/* ---- the grid of a comparison */

.mk-Comparison {
  display: flex;
  flex-direction: column;
  gap: 6px;
  min-width: 200px;
  padding: 4px 2px;
}

.mk-Comparison-verdict {
  font-weight: 600;
  overflow-wrap: anywhere;
}

.mk-Comparison-verdict[data-bad] {
  color: var(--mk-dead);
}

.mk-Comparison-legend {
  display: flex;
  flex-wrap: wrap;
  gap: 2px 12px;
  color: var(--mk-faint);
}

.mk-Comparison-box {
  display: inline-block;
  width: 1.4em;
  height: 1em;
  margin-inline-end: 0.4em;
  vertical-align: -0.1em;
  background: var(--mk-cell);
  forced-color-adjust: none;
}

.mk-View [data-level='same'] {
  --mk-cell: var(--mk-same);
}

.mk-View [data-level='within'] {
  --mk-cell: var(--mk-within);
}

.mk-View [data-level='mild'] {
  --mk-cell: var(--mk-mild);
  --mk-cell-on: var(--mk-mild-on);
}

.mk-View [data-level='much'] {
  --mk-cell: var(--mk-much);
  --mk-cell-on: var(--mk-mild-on);
}

.mk-View [data-level='most'] {
  --mk-cell: var(--mk-most);
  --mk-cell-on: var(--mk-most-on);
}

.mk-Comparison-scroll {
  position: relative;
  max-height: 420px;
  overflow: auto;
}

.mk-View .mk-Comparison-grid,
.mk-View .mk-Comparison-table {
  margin: 0;
  border: 0;
  border-collapse: collapse;
  font: inherit;
}

.mk-View .mk-Comparison-grid th,
.mk-View .mk-Comparison-grid td {
  padding: 1px;
  border: 0;
  background: var(--mk-surface);
  font-weight: normal;
  text-align: center;
}

.mk-View .mk-Comparison-grid thead th {
  position: sticky;
  z-index: 2;
  top: 0;
  color: var(--mk-faint);
}

.mk-View .mk-Comparison-grid tr > th:first-child {
  position: sticky;
  z-index: 1;
  left: 0;
  max-width: 260px;
  padding-inline-end: 8px;
  overflow: hidden;
  font-family: var(--mk-mono);
  font-size: 12px;
  text-align: start;
  text-overflow: ellipsis;
  white-space: nowrap;
}

.mk-View .mk-Comparison-cell {
  display: block;
  width: 100%;
  min-width: 46px;
  height: 24px;
  background: var(--mk-cell);
  color: var(--mk-cell-on, var(--mk-text));
  font-size: 12px;
  text-align: center;
  forced-color-adjust: none;
}

.mk-View .mk-Comparison-cell[data-first] {
  box-shadow:
    inset 0 0 0 3px var(--mk-text),
    inset 0 0 0 4px var(--mk-surface);
  font-weight: 700;
}

.mk-View .mk-Comparison-cell[aria-pressed='true'] {
  outline: 2px solid var(--mk-focus);
  outline-offset: -1px;
}

.mk-Comparison-title {
  flex: 1;
  min-width: 0;
  font-weight: 600;
  overflow-wrap: anywhere;
}

.mk-Comparison-tensors {
  max-height: 320px;
  overflow: auto;
}

.mk-View .mk-Comparison-table th,
.mk-View .mk-Comparison-table td {
  padding: 2px 12px 2px 0;
  border: 0;
  background: none;
  font-weight: normal;
  text-align: start;
  vertical-align: top;
}

.mk-View .mk-Comparison-table th {
  color: var(--mk-faint);
}

.mk-View .mk-Comparison-table tr[data-wrong] td:nth-child(5) {
  color: var(--mk-dead);
  font-weight: 600;
}
`;var mi=.01;function te(o,e){let t=o.get(e);return typeof t=="string"?t:""}function ci({model:o,el:e}){let t=document.createElement("style");t.textContent=kt;let i=document.createElement("div");e.append(t,i);let s=te(o,"view")==="grid"?pi(o,i):ui(o,i);return()=>{s(),t.remove(),i.remove()}}function pi(o,e){let t=new ee(e,o.get("grid")),i=new IntersectionObserver(()=>t.refresh());return i.observe(e),()=>{i.disconnect(),t.dispose()}}function ui(o,e){let t=new ne(c=>o.send(c)),i=c=>t.receive(c);o.on("msg:custom",i);let s=te(o,"mesh"),n=o.get("ranks")??[],r;if(te(o,"view")==="plot"){let c=te(o,"expression"),u=Number(o.get("period"))||1,k=new Z(e,c,t,{mesh:s,ranks:n,expression:c,period:u});t.onConnection(_=>k.setGone(_==="gone")),r=k}else{let c=te(o,"record");r=new K(e,t.store,t,{connection:t,ranks:n,record:c,...s?{mesh:s}:{}})}let a=!1,d=()=>t.setVisible(a&&document.visibilityState!=="hidden"),m=new IntersectionObserver(c=>{a=c.at(-1)?.isIntersecting??!1,d(),a&&r instanceof K&&r.refresh()},{threshold:[0,mi]});return m.observe(e),document.addEventListener("visibilitychange",d),()=>{m.disconnect(),document.removeEventListener("visibilitychange",d),o.off("msg:custom",i),r.dispose(),t.dispose()}}var Xs={render:ci};export{Xs as default,ci as render};
