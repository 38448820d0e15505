// The words of a program in colours: enough for the languages that models write most, and plain text for the others.
// Whatever opens ends at the end of the text at the latest, so nothing is searched twice.
import { h } from "./dom.js";

const MOST = 200_000; // characters; longer code stays plain

const words = (text) => new Set(text.split(" "));
const DOUBLE = /"(?:[^"\\\n]|\\[^])*"?/;
const SINGLE = /'(?:[^'\\\n]|\\[^])*'?/;
const TEMPLATE = /`(?:[^`\\]|\\[^])*`?/;
const SLASHES = /\/\/.*|\/\*[^]*?(?:\*\/|(?![^]))/;
const HASH = /#.*/;
const DASHES = /--.*|\/\*[^]*?(?:\*\/|(?![^]))/;
const NUMBER = /\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)\w*/;
const WORD = /[A-Za-z_$][\w$]*/;

const C_LIKE = "auto bool break case catch char class const constexpr continue default delete do double else enum explicit extern false final float for friend goto if inline int long namespace new noexcept nullptr NULL operator override private protected public register return short signed sizeof static static_cast struct switch template this throw true try typedef typename union unsigned using virtual void volatile while size_t string vector";
const FAMILIES = [
  ["python py python3 ipython", { comment: HASH, string: [/[rbfuRBFU]{0,2}(?:"""[^]*?(?:"""|(?![^]))|'''[^]*?(?:'''|(?![^])))/, /\b[rbfuRBFU]{1,2}(?=["'])/, DOUBLE, SINGLE], words: "and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return self True try while with yield" }],
  ["javascript js jsx mjs typescript ts tsx", { comment: SLASHES, string: [DOUBLE, SINGLE, TEMPLATE], words: "any as async await boolean break case catch class const continue debugger declare default delete do else enum export extends false finally for from function get if implements import in instanceof interface keyof let new null number of private protected public readonly return set static string super switch this throw true try type typeof undefined unknown var void while yield" }],
  ["json json5 jsonc jsonl", { comment: SLASHES, string: [DOUBLE], words: "true false null", keys: true }],
  ["bash sh shell zsh console shell-session fish", { comment: /(?<![\w$\\{])#.*/, string: [/"(?:[^"\\]|\\[^])*"?/, /'[^']*'?/, /\$\{[^}\n]*\}?|\$\w+/], words: "if then else elif fi for while until do done case esac in function return local export source set unset cd echo exit sudo alias read test trap shift eval exec" }],
  ["c h cpp c++ cc cxx hpp cuda cu objective-c", { comment: SLASHES, keyword: /#\s*(?:include|define|ifdef|ifndef|endif|if|else|elif|pragma|undef)\b/, string: [DOUBLE, SINGLE], words: C_LIKE }],
  ["java kotlin kt csharp cs c# scala swift dart", { comment: SLASHES, string: [/"""[^]*?(?:"""|(?![^]))/, DOUBLE, SINGLE], words: `${C_LIKE} abstract as async await base boolean by byte companion data decimal def extends fun func get guard implements import in init instanceof interface internal is lateinit let lock match nil null object open out package params readonly ref sealed self set some String super suspend synchronized throws trait val var when where with yield` }],
  ["go golang", { comment: SLASHES, string: [DOUBLE, SINGLE, TEMPLATE], words: "break case chan const continue default defer else error fallthrough false for func go goto if import int int32 int64 interface map nil package range return rune select string struct switch true type uint8 uint64 byte bool float64 var make len append" }],
  ["rust rs", { comment: SLASHES, string: [DOUBLE, /'(?:[^'\\\n]|\\.)'/], words: "as async await bool break const continue crate dyn else enum extern false fn for if impl in let loop match mod move mut pub ref return self Self static struct super trait true type unsafe use usize i32 i64 u8 u32 u64 f32 f64 str String Vec Option Result Some None Ok Err where while" }],
  ["sql postgresql mysql sqlite", { comment: DASHES, string: [SINGLE, DOUBLE, TEMPLATE], words: "add all alter and as asc begin between by case commit constraint create cross default delete desc distinct drop else end exists foreign from full group having in index inner insert int integer into is join key left like limit not null offset on or order outer over partition primary references returning right rollback select set table text then union unique update using values varchar view when where with", anyCase: true }],
  ["html xml svg vue markup", { comment: /<!--[^]*?(?:-->|(?![^]))/, string: [DOUBLE, SINGLE], keyword: /<\/?[\w:-]+|\/?>/, words: "" }],
  ["css scss less", { comment: SLASHES, string: [DOUBLE, SINGLE], key: /(?<![\w-])[\w-]+(?=:[\s\w#-])/, keyword: /@[\w-]+|![\w-]+/, words: "" }],
  ["yaml yml toml ini conf properties dotenv env", { comment: /(?<!\S)[#;].*/, string: [DOUBLE, SINGLE, /^[ \t]*\[[^\]\n]*\]/m], key: /^[ \t]*(?:- )?[\w.-]+(?=[ \t]*[:=])/m, words: "true false null yes no on off" }],
  ["ruby rb perl r julia elixir makefile make dockerfile docker cmake nix powershell ps1", { comment: HASH, string: [DOUBLE, SINGLE], words: "alias and begin break case class def do else elsif end ensure false for function if in include let local module next nil not or package param require rescue return self sub super then true unless until use when while yield FROM RUN CMD COPY ADD ENV WORKDIR EXPOSE ENTRYPOINT ARG LABEL USER VOLUME TRUE FALSE NULL" }],
  ["php", { comment: /\/\/.*|#.*|\/\*[^]*?(?:\*\/|(?![^]))/, string: [DOUBLE, SINGLE, /\$\w+/], words: "abstract array as break case catch class const continue default do echo else elseif extends false final fn for foreach function global if implements include instanceof interface namespace new null private protected public require return static switch this throw true try use var while yield" }],
  ["lua haskell hs ada", { comment: /--.*/, string: [DOUBLE, SINGLE], words: "and break case class data deriving do else elseif end false for function goto if import in instance let local module newtype nil not of or repeat return then true type until where while" }],
];

const languages = new Map();
for (const [names, rules] of FAMILIES) for (const name of names.split(" ")) languages.set(name, rules);

// The code as strings and coloured spans, whose texts together are the code.
export function highlight(code, language) {
  if (language === "diff" || language === "patch") return code.split(/(?<=\n)/).map(changed);
  const rules = languages.get(language);
  if (!rules || code.length > MOST) return [code];
  rules.pattern ??= patternOf(rules);
  rules.known ??= words(rules.anyCase ? rules.words.toLowerCase() : rules.words);
  const parts = [];
  let begin = 0;
  for (const match of code.matchAll(rules.pattern)) {
    const [text] = match;
    const { index, groups } = match;
    const kind = groups.word === undefined ? kindOf(groups, rules, code, index + text.length) : wordKind(text, rules, code[index + text.length]);
    if (!kind) continue;
    if (index > begin) parts.push(code.slice(begin, index));
    parts.push(h(`span.${kind}`, {}, text));
    begin = index + text.length;
  }
  if (begin < code.length) parts.push(code.slice(begin));
  return parts;
}

function patternOf({ comment, string, key, keyword }) {
  const groups = { comment, key, keyword, string: string.map(({ source }) => source).join("|"), number: NUMBER, word: WORD };
  const sources = Object.entries(groups).filter(([, each]) => each).map(([name, each]) => `(?<${name}>${each.source ?? each})`);
  return new RegExp(sources.join("|"), "gm");
}

function kindOf(groups, { keys }, code, end) {
  const kind = Object.keys(groups).find((name) => groups[name] !== undefined);
  return kind === "string" && keys && /^\s{0,20}:/.test(code.slice(end, end + 21)) ? "key" : kind;
}

function wordKind(word, { known, anyCase }, after) {
  if (known.has(anyCase ? word.toLowerCase() : word)) return "keyword";
  return after === "(" ? "call" : null;
}

function changed(line) {
  const kind = line.startsWith("+") ? "added" : line.startsWith("-") ? "removed" : line.startsWith("@@") ? "keyword" : null;
  return kind ? h(`span.${kind}`, {}, line) : line;
}
