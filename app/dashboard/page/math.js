// Formulas in TeX to MathML, for the part of TeX that models write. What is not known here makes no formula at all:
// `math` returns null, and its caller shows the source.
import { h } from "./dom.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const DEEPEST = 40; // groups within each other
const MOST = 10_000; // characters; of more, browsers need seconds to lay them out
const TOKEN = /\\(?:operatorname\*|[a-zA-Z]+|[^])|\s+|[^]/gu;

const table = (text) => Object.fromEntries(text.trim().split(/\s+/).map((pair) => { const [name, ...signs] = pair.split(":"); return [name, signs.join(":")]; }));
const LETTERS = table("alpha:α beta:β gamma:γ delta:δ epsilon:ϵ varepsilon:ε zeta:ζ eta:η theta:θ vartheta:ϑ iota:ι kappa:κ lambda:λ mu:μ nu:ν xi:ξ pi:π varpi:ϖ rho:ρ varrho:ϱ sigma:σ varsigma:ς tau:τ upsilon:υ phi:ϕ varphi:φ chi:χ psi:ψ omega:ω Gamma:Γ Delta:Δ Theta:Θ Lambda:Λ Xi:Ξ Pi:Π Sigma:Σ Upsilon:Υ Phi:Φ Psi:Ψ Omega:Ω infty:∞ partial:∂ nabla:∇ hbar:ℏ ell:ℓ Re:ℜ Im:ℑ aleph:ℵ emptyset:∅ varnothing:∅ dots:… ldots:… cdots:⋯ vdots:⋮ ddots:⋱ degree:° prime:′ top:⊤ bot:⊥ angle:∠ triangle:△ imath:ı jmath:ȷ");
const OPERATORS = table("times:× div:÷ cdot:⋅ pm:± mp:∓ ast:∗ star:⋆ circ:∘ bullet:∙ oplus:⊕ otimes:⊗ odot:⊙ cup:∪ cap:∩ setminus:∖ wedge:∧ land:∧ vee:∨ lor:∨ neg:¬ lnot:¬ leq:≤ le:≤ geq:≥ ge:≥ neq:≠ ne:≠ ll:≪ gg:≫ equiv:≡ sim:∼ simeq:≃ approx:≈ cong:≅ propto:∝ mid:∣ parallel:∥ perp:⟂ in:∈ notin:∉ ni:∋ subset:⊂ subseteq:⊆ supset:⊃ supseteq:⊇ forall:∀ exists:∃ nexists:∄ to:→ rightarrow:→ leftarrow:← gets:← leftrightarrow:↔ longrightarrow:⟶ longleftarrow:⟵ Rightarrow:⇒ Leftarrow:⇐ Leftrightarrow:⇔ implies:⟹ impliedby:⟸ iff:⟺ Longrightarrow:⟹ mapsto:↦ uparrow:↑ downarrow:↓ hookrightarrow:↪ models:⊨ vdash:⊢ therefore:∴ because:∵ colon:: lvert:| rvert:| vert:| lVert:‖ rVert:‖ Vert:‖ |:‖ lbrace:{ rbrace:} {:{ }:} langle:⟨ rangle:⟩ lfloor:⌊ rfloor:⌋ lceil:⌈ rceil:⌉ backslash:\\ %:% #:# &:& _:_ $:$ square:□ blacksquare:■ checkmark:✓");
const LARGE = table("sum:∑ prod:∏ coprod:∐ bigcup:⋃ bigcap:⋂ bigoplus:⨁ bigotimes:⨂ bigvee:⋁ bigwedge:⋀ int:∫ iint:∬ iiint:∭ oint:∮");
const NAMES = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp det dim ker deg gcd hom arg Pr".split(" "));
const LIMITS = new Set("lim max min sup inf argmax argmin limsup liminf".split(" "));
const ACCENTS = table("hat:^ widehat:^ bar:¯ overline:¯ vec:→ overrightarrow:→ dot:˙ ddot:¨ tilde:~ widetilde:~ overbrace:⏞ check:ˇ");
const BELOW = table("underline:_ underbrace:⏟");
const SPACES = { ",": 0.17, ":": 0.22, ";": 0.28, "!": 0, " ": 0.25, "~": 0.25, quad: 1, qquad: 2, enspace: 0.5, thinspace: 0.17 };
const FONTS = { mathbb: "double-struck", mathcal: "script", mathscr: "script", mathfrak: "fraktur", mathbf: "bold", boldsymbol: "bold", bm: "bold", mathrm: "normal", mathit: "italic", mathsf: "sans", mathtt: "mono", operatorname: "normal", text: "text", textbf: "text", textit: "text", textrm: "text", texttt: "text", mbox: "text", "operatorname*": "normal" };
const FIRST = { "double-struck": [0x1d538, 0x1d552], script: [0x1d49c, 0x1d4b6], fraktur: [0x1d504, 0x1d51e], bold: [0x1d400, 0x1d41a], sans: [0x1d5a0, 0x1d5ba], mono: [0x1d670, 0x1d68a] };
const HOLES = { 0x1d53a: "ℂ", 0x1d53f: "ℍ", 0x1d545: "ℕ", 0x1d547: "ℙ", 0x1d548: "ℚ", 0x1d549: "ℝ", 0x1d551: "ℤ", 0x1d49d: "ℬ", 0x1d4a0: "ℰ", 0x1d4a1: "ℱ", 0x1d4a3: "ℋ", 0x1d4a4: "ℐ", 0x1d4a7: "ℒ", 0x1d4a8: "ℳ", 0x1d4ad: "ℛ", 0x1d4ba: "ℯ", 0x1d4bc: "ℊ", 0x1d4c4: "ℴ", 0x1d506: "ℭ", 0x1d50b: "ℌ", 0x1d50c: "ℑ", 0x1d515: "ℜ", 0x1d51d: "ℨ" };
const MATRICES = { matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"], vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], smallmatrix: ["", ""], cases: ["{", ""], array: ["", ""], aligned: ["", ""], align: ["", ""], "align*": ["", ""], split: ["", ""], gathered: ["", ""], gather: ["", ""], "gather*": ["", ""], equation: ["", ""], "equation*": ["", ""] };

export function math(tex, isShown) {
  if (!tex.trim() || tex.length > MOST) return null;
  try {
    const row = new Reader(tex, isShown).all();
    const note = element("annotation", tex.trim());
    note.setAttribute("encoding", "application/x-tex");
    const root = element("math", element("semantics", row, note));
    if (!isShown) return root;
    root.setAttribute("display", "block");
    return h("div.formula", { tabIndex: 0 }, root);
  } catch (error) {
    if (error instanceof Unknown) return null;
    throw error;
  }
}

class Unknown extends Error {}

function element(name, ...children) {
  const made = document.createElementNS(MATHML, name);
  made.append(...children);
  return made;
}

function operator(sign, attributes = {}) {
  const made = element("mo", sign);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function row(children) {
  if (children.length === 1) return children[0];
  const made = element("mrow");
  for (const each of children) made.append(each);
  return made;
}

// Reads the tokens from left to right, once.
class Reader {
  constructor(tex, isShown) {
    this.tokens = tex.match(TOKEN);
    this.at = 0;
    this.depth = 0;
    this.isShown = isShown; // limits stand below and above
  }

  all() {
    const made = this.lines((token) => token === undefined);
    if (this.at < this.tokens.length) throw new Unknown(this.tokens[this.at]);
    return made;
  }

  // What stands until a token for which `ends` holds; it is not taken. A line end outside of a matrix makes a table.
  lines(ends) {
    const rows = this.cells(ends);
    return rows.length === 1 && rows[0].length === 1 ? rows[0][0] : tableOf(rows, "aligned");
  }

  cells(ends) {
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(this.row((token) => ends(token) || token === "&" || token === "\\\\"));
      const token = this.peek();
      if (ends(token)) break;
      this.at++;
      if (token === "&") continue;
      if (this.peek() === "[") this.until("]");
      if (ends(this.peek())) break;
      rows.push([]);
    }
    return rows;
  }

  row(ends) {
    if (++this.depth > DEEPEST) throw new Unknown("too deep");
    const children = [];
    let isAfterName = false; // such as sin or log, which have room around them
    while (!ends(this.peek())) {
      const each = this.scripted();
      if (!each) continue;
      const isName = isNamed(each) || (/^m(sub|sup|under)/.test(each.tagName) && isNamed(each.firstChild));
      const isApart = (isAfterName && !/^[([|]/.test(each.textContent)) || (isName && children.length && children.at(-1).tagName !== "mo");
      children.push(...(isApart ? [space(SPACES[","])] : []), each);
      isAfterName = isName;
    }
    this.depth--;
    return row(children);
  }

  peek() {
    while (/^\s/.test(this.tokens[this.at] ?? "")) this.at++;
    return this.tokens[this.at];
  }

  next() {
    const token = this.peek();
    if (token === undefined) throw new Unknown("the end");
    this.at++;
    return token;
  }

  // The source of a group, such as a name or a text.
  source() {
    if (this.peek() !== "{") return this.next();
    this.at++;
    return this.until("}");
  }

  until(end) {
    const begin = this.at;
    for (let open = 0; this.at < this.tokens.length; this.at++) {
      const token = this.tokens[this.at];
      if (token === end && !open) return this.tokens.slice(begin, this.at++).join("");
      open += token === "{" ? 1 : token === "}" ? -1 : 0;
    }
    throw new Unknown(end);
  }

  // What a command takes: a group, or the next thing.
  argument() {
    if (this.peek() !== "{") return this.atom() ?? element("mrow");
    this.at++;
    const made = this.row((token) => token === "}" || token === undefined);
    if (this.next() !== "}") throw new Unknown("}");
    return made;
  }

  scripted() {
    let base = /^[_^]$/.test(this.peek()) ? null : this.atom();
    const { takesLimits } = base ?? {};
    let [below, above] = [null, null];
    for (;;) {
      const token = this.peek();
      if (token === "_" && !below) { this.at++; below = this.argument(); }
      else if (token === "^" && !above) { this.at++; above = this.argument(); }
      else if (token === "'" && !above) {
        let marks = "";
        for (; this.peek() === "'"; this.at++) marks += "′";
        above = element("mo", marks);
        if (this.peek() === "^") { this.at++; above = element("mrow", above, this.argument()); }
      } else if (token === "\\limits" || token === "\\nolimits") this.at++;
      else break;
    }
    if (!below && !above) return base;
    base ??= element("mrow");
    const [sub, sup, both] = takesLimits && this.isShown ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    return below && above ? element(both, base, below, above) : below ? element(sub, base, below) : element(sup, base, above);
  }

  atom() {
    const token = this.next();
    if (token === "{") {
      this.at--;
      return this.argument();
    }
    if (token[0] === "\\") return this.command(token.slice(1));
    if (/\d/.test(token)) {
      let digits = token;
      for (let each; /^[\d.]$/.test((each = this.tokens[this.at] ?? "")) && (each !== "." || /\d/.test(this.tokens[this.at + 1] ?? "")); this.at++) digits += each;
      return element("mn", digits);
    }
    if (/\p{L}/u.test(token)) return element("mi", token);
    if (/[}^_&#$%]/.test(token)) throw new Unknown(token);
    if (token === "~") return space(SPACES["~"]);
    return operator(token === "-" ? "−" : token === "*" ? "∗" : token, /[()[\]|/]/.test(token) ? { stretchy: "false" } : {});
  }

  command(name) {
    if (name in Object.prototype) throw new Unknown(name); // all tables of names have these
    if (LETTERS[name]) return element("mi", LETTERS[name]);
    if (OPERATORS[name]) return operator(OPERATORS[name], /[{}|‖⟨⟩⌊⌋⌈⌉]/.test(OPERATORS[name]) ? { stretchy: "false" } : {});
    if (LARGE[name]) return Object.assign(operator(LARGE[name], this.isShown ? { largeop: "true" } : {}), { takesLimits: !/[∫∬∭∮]/.test(LARGE[name]) });
    if (NAMES.has(name)) return named(name);
    if (LIMITS.has(name)) return Object.assign(named(name.replace(/^(arg|lim)(?=.)/, "$1\u2009")), { takesLimits: true });
    if (name in SPACES) return space(SPACES[name]);
    if (name in FONTS) return this.font(FONTS[name], name);
    if (ACCENTS[name]) return Object.assign(element("mover", this.argument(), operator(ACCENTS[name], { stretchy: String(/wide|over/.test(name)) })), { takesLimits: name === "overbrace" });
    if (BELOW[name]) return Object.assign(element("munder", this.argument(), operator(BELOW[name], { stretchy: "true" })), { takesLimits: name === "underbrace" });
    return this.structure(name);
  }

  structure(name) {
    if (/^[dtc]?frac$/.test(name)) return element("mfrac", this.argument(), this.argument());
    if (/^[dt]?binom$/.test(name)) {
      const fraction = element("mfrac", this.argument(), this.argument());
      fraction.setAttribute("linethickness", "0");
      return element("mrow", operator("("), fraction, operator(")"));
    }
    if (name === "sqrt") {
      if (this.peek() !== "[") return element("msqrt", this.argument());
      this.at++;
      const degree = this.row((token) => token === "]" || token === undefined);
      this.next();
      return element("mroot", this.argument(), degree);
    }
    if (name === "overset" || name === "stackrel") {
      const above = this.argument();
      return element("mover", this.argument(), above);
    }
    if (name === "underset") {
      const below = this.argument();
      return element("munder", this.argument(), below);
    }
    if (name === "left") return this.fenced();
    if (/^([bB]igg?[lrm]?|middle)$/.test(name)) return operator(this.delimiter());
    if (name === "begin") return this.environment(this.source());
    if (name === "not") {
      const base = this.atom();
      if (!base) throw new Unknown(name);
      base.append("\u0338");
      return base;
    }
    if (name === "pmod") return element("mrow", operator("(", { stretchy: "false" }), element("mi", "mod"), space(0.3), this.argument(), operator(")", { stretchy: "false" }));
    if (name === "bmod" || name === "mod") return element("mo", "mod");
    if (name === "boxed") {
      const box = element("mrow", this.argument());
      box.setAttribute("class", "boxed");
      return box;
    }
    if (name === "tag" || name === "label") {
      this.source();
      return null;
    }
    if (/^(displaystyle|textstyle|scriptstyle|limits|nolimits|nonumber|notag|hline)$/.test(name)) return null;
    throw new Unknown(name);
  }

  delimiter() {
    const token = this.next();
    if (token === ".") return "";
    if (token[0] !== "\\") return token;
    const sign = OPERATORS[token.slice(1)];
    if (!sign) throw new Unknown(token);
    return sign;
  }

  fenced() {
    const children = [operator(this.delimiter(), { stretchy: "true", fence: "true" })];
    children.push(this.lines((token) => token === "\\right" || token === undefined));
    if (this.next() !== "\\right") throw new Unknown("\\right");
    children.push(operator(this.delimiter(), { stretchy: "true", fence: "true" }));
    return element("mrow", ...children);
  }

  environment(name) {
    if (!Object.hasOwn(MATRICES, name)) throw new Unknown(name);
    if (name === "array") this.source();
    const rows = this.cells((token) => token === "\\end" || token === undefined);
    this.next();
    if (this.source() !== name) throw new Unknown(name);
    const [left, right] = MATRICES[name];
    const made = tableOf(rows, name);
    return left || right ? element("mrow", operator(left, { stretchy: "true" }), made, operator(right, { stretchy: "true" })) : made;
  }

  font(font, name) {
    if (font === "text") return element("mtext", this.source().replaceAll(" ", "\u00a0"));
    const source = this.source();
    if (!/^[\p{L}\d\s*+.,-]*$/u.test(source)) { // symbols, or commands: as they are
      const inner = new Reader(source, this.isShown);
      if ((inner.depth = this.depth + 1) > DEEPEST) throw new Unknown("too deep");
      return inner.all();
    }
    if (font === "normal") return Object.assign(named(source), { takesLimits: name.endsWith("*") });
    return element("mi", [...source].map((letter) => styled(letter, font)).join(""));
  }
}

function named(name) {
  const made = element("mi", name);
  made.setAttribute("mathvariant", "normal");
  return made;
}

const isNamed = (made) => made.tagName === "mi" && made.hasAttribute("mathvariant");

function space(width) {
  const made = element("mspace");
  made.setAttribute("width", `${width}em`);
  return made;
}

function styled(letter, font) {
  if (!/[A-Za-z]/.test(letter) || !FIRST[font]) return letter;
  const isSmall = letter >= "a";
  const code = FIRST[font][isSmall ? 1 : 0] + letter.charCodeAt(0) - (isSmall ? 97 : 65);
  return HOLES[code] ?? String.fromCodePoint(code);
}

function tableOf(rows, kind) {
  const made = element("mtable");
  made.setAttribute("class", /align|split/.test(kind) ? "aligned" : kind === "cases" ? "cases" : "matrix");
  for (const cells of rows) made.append(element("mtr", ...cells.map((cell) => element("mtd", cell))));
  return made;
}
