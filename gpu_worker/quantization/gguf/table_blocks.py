"""Unpacks the blocks of GGUF whose numbers are entries of a table: IQ4, and the grids of IQ2 and IQ3.

A grid's entry is the magnitudes of 4 or 8 neighbouring numbers; their signs stand beside it. Grids are kept here as
indices of 2 or 3 bits into the few magnitudes that there are, the lowest bits first, in base 85.

Eight numbers are computed at once, a byte each of an int64: `(m ^ s) - s` is `-m` where all bits of byte `s` are set.

Source: ggml's block structures and tables; bytes below are offsets into a block.
"""

from __future__ import annotations

import base64
from typing import NamedTuple

import torch


class TableNumbers(NamedTuple):
    """`codes: [rows, num_blocks, block_size]` uint8, and the scale's `factors: [rows, num_blocks, num_groups]`."""

    codes: torch.Tensor
    factors: torch.Tensor


CENTRE = 128
"""The code of zero, of all but `iq3_s`."""

_EACH_BYTE = 0x0101010101010101

_IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ2_MAGNITUDES = (8, 25, 43)
_IQ3_MAGNITUDES = (4, 12, 20, 28, 36, 44, 52, 62)
_IQ2_XXS = (
    "000621po*D3IGuR6aXLqA^<1=DgZ$ML;z3#SO8%FWB`Bwf&hvDq5uH_1OX5M6#+m2gaMcV00II6A_9T}0R#jD5CkCvBm_VNLIg+zU<82#ganWTqy"
    "zv30tE;KAO%JRX$61<kp&3`5C%X7ga)Jr00;#L2nZAiC<s9aL<mp_QV56$1PMS10tyrg0T2Wb5D*~{KoDRMgb<Jrl@I_C2oWF=P!U=YfDt4TMG^o"
    "M2oxX`B@{^%fD{-NVif=u78U^*1Q-w)Kp24-02u`tpczpb03ZS&3Lr!vVIY7Yf*>g&NFe|s0wMt<1SAk7KqOWq03|^sWF?R$2q+*Zlqf_h0YC&m5"
    "I`6}AwVQRKtM=9RzP4tfk1>nkU#)IAVFb4fI)>p0YVT$NJ3UZXhHx)2t*)6fJB)@5=A6M07d~w1V|7_KuASM07+O$VM&5XMM{uL08j`}5l|UWAW("
    "o%h)@JkLQ$kqky4OUl2i&+0ajF209X-N8CYakKv@V{1Yi(gKwxNK0AW>O7-C>z0AvMZ5M>f&gk?f#0DuC33V=a?f`9~p7=b{65rP4P1cVTT6@);9"
    "V1xjLMun7x35Gz1V1@#S1c?!f1dtGrB#=Omp^z4lfRRO#0F)w>M3hmLftVnf0-#W!g`f$c0HPSAP^bi{"
)
_IQ2_XS = (
    "000621po*D3IGuR6aW?g82}&vA^;@-C;&kKL;ywrNdQm)QUFx|SO8%FWB`Bwf&hg8hyalQlmM9kpa1~@1OWyC2>}oR5&;zf7y%jqAps--KmkGlMF"
    "B_wQ2|r|U;$_WfdPa8kO2S!0s;jB2m%oT6apXuK>|bqPy$r~fC7pF0R#jD1_TKN5Cjqg6$BUrAp|4@Km<YrMFdC$Q3O;3Rs>)KfdqsEkOTk)0tE#"
    "H2n7)Z6a^p!K?OtwPz7NHfCT{t1O^ZWCI&zTLI#8e00;sI1qcWT3J4Jh6bK*)B?v(XL<mp_SO|a!pa`l60SN>N5D7pDfeDET016-qC<>Mepb7yH1"
    "P}%g2@ntv5)c&-7!V;4BoIIlLJ&m|NDxsFR1jbgY7l`Cgb<Jr01*Na1rZ1l5fKy-AQ3?kL=jLCfDx1tmJtCG1QG@k5E4KVU=jcn0u%)l2ow<%6ci"
    "v7K@>z3Nfb~NWE6lD0Tl!l5EVcb02UM$NfrSZ1Q-w)5*R=jR2YUB02u`tW*Jc$sTu$v0w4t-2p|d|5g-&GARs{?L?BQgfFPhC0U-n-5FtPzNFik*"
    "03sqHfFh_O0VD(@5F{xiKqLSqK_yZpnI!=x8YZSD04NA33Me2bRVaukq9|x7kSPc%AS!|?h$@OI0YC&m20#fw5I_<@6+jq3AwVQRKtMu3ML<YEN<"
    "dLSR6t-rWk7*Igg}r$06_vl1wjZw5kV9|AVEPvL_ttNfI)>pqCo*d1VRu(5<)3LKtcdS0z?Hw2t*M?6hs+BAVfh#L_|<TfJBr;0YwBw5Je<KKt-B"
    "G07eQ%L`G0X0Z0T$5J*5sMMzXgVn_f<5lKWzP)TV?1WEu<0#F4|2v8AF6i^^gC{RIAL{LyrfKUNZ1W^!C6;VJ@LQw!xL{h3!0aOH35L6*lKvZB<f"
    "mESX096Q8fK`Z9Ay#Nsp;iD`6j(u6P*|B*8d*SDLRp1c0bm4R5MV%HRA6FYhG3~+0AVCzN@9{?0Av<q5M@ARMP;OA0cdJyC20m~RBB>s0DuC31%L"
    ">E5r7ncAb=`>L4ZVnP=J7df`F)is(=B31c3&D5P?8}QGr>30D>TbfP#X8pn|A^0fYpE5QGwh6@);9V1$W;0EI+_rG*%VYK8!a2#6(!T8My%f{3Vy"
    "28kkyfQpEUmWrr~0gwcc5RgESR*-~{0Ffe*WRX^qiIM=61(ZaTP?T7dDV30wl9fT0QJAKfNtqRzV447+0-y+>3ZNjMDxjdCQK4C(rlA0$0-^|_Dx"
    "!d*prSyem84~+n5GJ-AgCg!D5#*QsHg;~gsFz9D5@%|k*cby"
)
_IQ2_S = (
    "000621po*D3IGuR6aW?g82}&vA^;@-C;&kKL;ywrNdQm)QUFx|SO8%FWB_IWX#ju#f&hg8hyalQlmMUrr2wh`0RaR71_22H5CIYa6#*ClAps--Km"
    "kGlMFB_wQ2|r|RsmT7U;$+TXaRu%gaMENk^z+gp#h`;00II61p){H5dstfAOb1^K>|bqMgmC!Py$r~fC7aAiUO1Zq5=T~1Ox^I2?P)X5(E_l7z7~"
    "%Bm^b|DFi?SLIgzwNCZj*Q3O;3Rs>lDU<6_WWdwl)gan2Ji3E@Yl?0dsp#-D^00jaC1qBEN3I!1b6a^Lq83iB(B?Tx2K?OtwMg>U)Pz6#2RRvfDV"
    "FhFbfCYjDg$0NOkp+|mpalU21O^5M2?h`b6$U^CMFvO)Q3g~7U<QE(ga(iX00;sI1qcWT5eO6r76=&#AP6N0DhNRcL<mL*NeEB~QV3NDSO{SVWC("
    "x=g$R@gst5rI1PKrc5(yOv7zrT>KnX<&NC{C1R0&`SfeDZa016Qb6bd2=C<-bHPzsp}0T2Wb1`r7l5D*d&6%ZH@ArK@GCJ;anLJ&m|NDxsFR1j7W"
    "SrA|lVi08zXb^!Agb;=hkPwv+m=K{5q!0iR0ucof2oVYq5fKy-77-Z{AQ2)FB@rkQK@mg|MiEI7P!UoQRS{SbVG(2zfDwWbg%OAmkr9*;0TKif2@"
    "((z6%rv5BoaUpMG{dGR1$#_gc6Vv02Bfg1r!Jr5fl^@78Ds2AQUAOC=@{yL=;98Nfb~NQWRAbSQKFtWE6lDf)s@mh!l|&loX&80Tl!l1{Dbv5ET*"
    "?6%`m2Ar&MQKovq2MHNUDQ594bU=@KCgcXn#02T!n2o@0*6c!*BK^8<7P!@m|sulql1Q-Sw2^bI<6&M&8As9dyLKsCDNElHVR2X0wff$4s02u-q1"
    "sMn#5g8O2AQ?d!L>W*SX&Is!1R4+;KpIvW03ZS&1t16@5g-&G79bfQARr|mDj-21L?BQgQXo|zWFUYbiXfCAsvrR&1R)S15+M~KAt68^LLo&VQ6W"
    "?zU?G7agdvb203r$^A|favDk4N8P$GyTiXx~Y0VD(@1|$h25F`~O7$hMiBqTs2LL@~bNF-4tR3u;|fh2?^kR$*l1tkb25hWBQASFR1L?uuqW+i|n"
    "0VV_{5GFt-StbA|1t<|H6evL`L?}=wiYTfm0VxD25Gj=@3MwKhWGaX%iYfs>1V9Er2|y4)5<nF|7(g08AwVQRCO|+yLO?}8NI*(JQ9x8cRzO)mU_"
    "fF(Wk7*Igg}r$l|Yz4p+KZS06_vl1wjZw5kV9|7C{+7AVDHQB|$+!L_tPDNkLFSQbAQgSV3VyWI=#If<c8rh(VD-ltG|D0YU^q5JD0{6+#$7Btk$"
    "!MM6kIQ9@KgU_yaHghBvB0z?Hw2t*1*5kwS37DO3DAVeZWB}6DhK}1AEMnp+OP()HhRYX`sVMJs^fJA~sg+z!%kwlb4phN*h1Vsi#2}KY^5=9k77"
    ")2pPBt<|)LPbSINJUXaR7GG#YDIxXghh}=07e2v1x5%)5k?e7AVxt(L`G0XfJUW80Z0T$2}lq~5=a$D7)T*VBuGF=LP$kONJvpgR7hY*gh-G`07("
    "K#1xW}=5lIwDAW1<<L`hIdfJv4~0ZIf)5K2Hw08j!@1yBf35l|FR7El>bAW$MuB~U0(K~O|cMo>vmP*74(RZv(^VNhgHfKY-^g;0o4kx-OS0Z{}|"
    "22lx75K$6Q6;T*bAyFhzKv6<bMNvpmQBhP;U{Qflgi(-D08#}~2vQMJ6jC5kK~h9gP*Q19fKmZe1XKo82~-eN5>ypb7*rutBve3DLR3XmNK{c&R8"
    "(M8fmDQ4kW>Iw0#yZ72vreP6jdNqK~+RmP*s3c0agT75LPBuKvn=)0$2rD2v`wV6j&fwL0CjsP*_@6fLH-p1X&PSKv@7<8Cr!}s9FJF1YibW5MUB"
    "u6<`=(Az&n6Kww2+NMKQ5RA69WgkX?h0AT`Q1z`wb5n&WzAYnmaL}5^2fMJ<o1Y!_kKw?&6p<)1J1!M?h5o8o(AY?&gL}XB8fMfw>1Z5CqKxIm0X"
    "l0UR0A`eC0cZqh5NKs+m}mfLDrrJ$p=tnt0)Pd82!IiQ6o46kAb=%+L4ZVnP=Hc^Re)H4VSs>ug@BQOlz;(&1c3>G5P=eb6@eImA%P@;K!HMmMS)"
    "0xQGrx}fq{g9kb$Xz0D=XA3W5=W6oNs5M1oL)0fYpE280QO5QGwh6@(asA%sALLWD(xNQ6;@RD@uJfrNyFkc0q*0)+*I2!#=a6onv#L4`zxP=$bn"
    "iiH7&1cnfXDTY9X0Eh*M5r`CsL5M_%P>7<40f_{OK#66EB8pgwT8e^-qKW~K1ds`k5Rej(6_6N^B#=OmLXbs}NRUyGRFGhhfslldkdOe81(6Yv6p"
    "=xZM3GRDT9E;g1d<SvK$51C0F(lh1(XPs5tI~^Ae2FrM3hjJfRvV$0hI)m5S2icn3bWG0G39UWR?M#1eg$*CYV5&sh9wnNtsfakeUFX1)vI`6rdu"
    "YDxg82M4(WhqM)jvK%r%!0-_3{BBCgwDx!j-h@y(3sG<R+1f&q8K%|MJq@)0)8KqIC3aBWkqNr4<hN%du3aTKgBC05=h^nfp"
)
_IQ3_XXS = (
    "03ZMakN^wt01zMn86W~X&;vm*1W2F+QBVa~pao&T26zAnf<Op~011+i37hZ<sqhND5DdqF49ZXq_^=QkK@u;q6Fm_WN1+vJ(HXRX9L(Vy;}IVLG9"
    "U<|AQ3Vl7@{E@av~@KBtnuTP$DIPGAM|mD3O9Gx&kc10xj8MF7^^I1%onBLp5fTH-#fT-~&Jclt2pvK@wy^86-kMG(<&&L`oDzSTsj>ghzlRNQv}"
    "FkR(Z;1WK(GOvuDc_{2{gwNgWMRbj<f!8KgYRbByxU<wvt6NX|nrei=RWKfo6WM*c8HfV@eX{x4c$+m46cXB!hbVet2ZO3??H+$O$e+2k|9r%GO_"
    "=0>0iJu6HuxN|NSdIjlk~CSBV~Ll=iJZ!boeCPFI0~djYNc(;sG6#)!n&>qJFyq5vqGD-s7t-#OTi>;!ZaMkas0@%jLqIm(nYP-n?2moJ>Ug?;0U"
    "haDsJUquIQz%>cHOY+Yav$AM!vi^i+@e"
)
_IQ3_S = (
    "01yBIPyh#j012P~4B!9|5CIji0U#g(C2#^MumUh313AD0KL7+lAOu8!1WC{YP%s5okOf^p260dadH@K4PzZ;B2#eqdkx&VkzzL#I3a5|?tAGo;Fb"
    "v7i4A3AA*{}`XKo01j4)>4`{QwXP@emO~5gGv!Basp~ArwRb6;fdpTM-szaTa#57lx4-i;)?sksH7v9K-<~(qSFjfgbDuAORvE1cD$5vLFreAP^!"
    "U8NwkR!XhpbBRT>kK{6ypf+S25C0Md0VS*-Vf+v0gD2mc3j{+%_qA8#<Dy;%5x)LnJaxBQQEYWf;*upL0A}{zdFa@J943jY%BQhp~GAt7`NV7Cig"
    "Ed-{HjqO(mqR+H6FkF%JjxS2-4j0YgFgTiKm$}j2ZTTh#6S)dK@)UA7^FcVG(shWLMn7aIJ84O1VloFL`(EUQdC7*#6@D1Mu9{~hZISZgh`(iN~`"
    "orxx`DrBuvGWOwvS6*|bgKgiiJpPzME36Qxld6;e9YQ$&?iQuS3}wN`iqSb}v}k=0tURb0tsUD!2V=p|qYwqOnRU=o&L8`fbWMq($HVl$RwK{jMX"
    "#$-`8Wnczpdgf<<rf86+X`F^?!G>(i7H!jZZP*rW<92TCwr>NMa1JMN8K-hEM{_}kbV^rsT1R$nw|9;gdcik*&?kM}2Y>{qfDlN57pQ?Dh=MpMgh"
    "!Z!ODKg{*o9-5hHV&#gNTTY7>Sz*imxb(xJZo2xQx&!joH|Z04b0Z`H>)*lSO%yQ7M;;$(gW;oXv@y<C&fUil7WCp&&}4C#s@0%A-L#q(!QvQL3e"
    "S3aE)XshH}it17I=imca4uIXB@`x>wW3$Yq&vPx^UX}h+fE4;)jy$QU)4V=Ln48uSS#aB$nip<HP+{&_y%fQUc(G1QNJ<>7_)I-hHa9!A-o!rX}-"
    "~@i)5H8^!4&p2><3gU~R6gcq9_WOQ=#C!gn4apwuI=5v?g3x$3lH%qFZE(C_?Zv<"
)


def iq4_nl(blocks: torch.Tensor) -> TableNumbers:
    """Read 16 bytes, whose low halves are the first 16 numbers and high halves the others."""
    return TableNumbers(_iq4(blocks[..., 2:18]), torch.ones_like(blocks[..., :1], dtype=torch.float32))


def iq4_xs(blocks: torch.Tensor) -> TableNumbers:
    """Read 8 groups of such 16 bytes, and of each group a factor of 6 bits, the upper two apart."""
    upper = _bits(_words(blocks[..., 2:4], torch.int16), range(0, 16, 2), 3)
    factors = (_halves(blocks[..., 4:8]) | (upper << 4)) - 32
    return TableNumbers(_iq4(blocks[..., 8:136]), factors.float())


def iq2_xxs(blocks: torch.Tensor) -> TableNumbers:
    """Read 8 groups of 8 bytes: four entries, then their signs and the group's factor in one word."""
    groups = torch.unflatten(blocks[..., 2:66], -1, (8, 8))
    factors, signs = _signs_and_factors(groups[..., 4:].flatten(-2))
    entries = _entries(groups[..., :4].flatten(-2), _IQ2_XXS, _IQ2_MAGNITUDES)
    return TableNumbers(_codes(entries, signs), (factors + 0.5) * 0.25)


def iq2_xs(blocks: torch.Tensor) -> TableNumbers:
    """Read 32 words of an entry and its signs, then the factors of 16 groups."""
    words = _words(blocks[..., 2:66], torch.int16) & 0xFFFF
    entries = _entries(words & 511, _IQ2_XS, _IQ2_MAGNITUDES)
    return TableNumbers(_codes(entries, _with_parity(words >> 9)), (_halves(blocks[..., 66:74]) + 0.5) * 0.25)


def iq2_s(blocks: torch.Tensor) -> TableNumbers:
    """Read 32 entries, their signs, the upper two bits of the entries, and the factors of 16 groups."""
    index = blocks[..., 2:34].int() | (_bits(blocks[..., 66:74], range(0, 8, 2), 3) << 8)
    codes = _codes(_entries(index, _IQ2_S, _IQ2_MAGNITUDES), blocks[..., 34:66])
    return TableNumbers(codes, (_halves(blocks[..., 74:82]) + 0.5) * 0.25)


def iq3_xxs(blocks: torch.Tensor) -> TableNumbers:
    """Read 64 entries, then 8 words of the signs and the factor of a group."""
    factors, signs = _signs_and_factors(blocks[..., 66:98])
    return TableNumbers(_codes(_entries(blocks[..., 2:66], _IQ3_XXS, _IQ3_MAGNITUDES), signs), (factors + 0.5) * 0.5)


def iq3_s(blocks: torch.Tensor) -> TableNumbers:
    """Read 64 entries, their upper bits, their signs, and the factors of 8 groups; codes `c` mean `2 c - 15`."""
    index = blocks[..., 2:66].int() | (_bits(blocks[..., 66:74], range(8), 1) << 8)
    # Magnitudes are 1, 3, ... 15, by their numbers `n`: codes are 8 + n and 7 - n.
    numbers, signs = _entries(index, _IQ3_S, tuple(range(8))), _sign_bytes(blocks[..., 74:106])
    codes = (numbers ^ (signs & (7 * _EACH_BYTE))) | (~signs & (8 * _EACH_BYTE))
    return TableNumbers(codes.view(torch.uint8), (2 * _halves(blocks[..., 106:110]) + 1).float())


def _iq4(stored: torch.Tensor) -> torch.Tensor:
    """Return the codes of numbers whose halves of bytes stand 16 apart."""
    values = [value + CENTRE for value in _IQ4_VALUES]
    pairs = torch.tensor([[values[byte & 15], values[byte >> 4]] for byte in range(256)], dtype=torch.uint8)
    found = _looked_up(pairs.view(torch.int16)[:, 0], stored).view(torch.uint8)
    return torch.unflatten(found, -1, (-1, 16, 2)).transpose(-1, -2).flatten(-3)


def _words(stored: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return stored.clone(memory_format=torch.contiguous_format).view(dtype).int()


def _bits(stored: torch.Tensor, shifts: range, mask: int) -> torch.Tensor:
    """Return the pieces of each number that begin at these bits: `[..., n]` to `[..., n * len(shifts)]` int32."""
    return torch.stack([(stored.int() >> shift) & mask for shift in shifts], dim=-1).flatten(-2)


def _halves(stored: torch.Tensor) -> torch.Tensor:
    return _bits(stored, range(0, 8, 4), 15)


def _looked_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the entries of a table, in the shape of `index`."""
    return table.to(index.device).index_select(0, index.flatten().int()).view(index.shape)


def _with_parity(signs: torch.Tensor) -> torch.Tensor:
    """Return the bits of 8 signs by those of the first 7: how many numbers are negative is even."""
    folded = signs ^ (signs >> 4)
    folded = folded ^ (folded >> 2)
    return signs | (((folded ^ (folded >> 1)) & 1) << 7)


def _signs_and_factors(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Read words of four times 7 bits of signs, and a factor of 4 bits above them."""
    words = _words(stored, torch.int32)
    return ((words >> 28) & 15).float(), _with_parity(_bits(words, range(0, 28, 7), 127))


def _sign_bytes(signs: torch.Tensor) -> torch.Tensor:
    """Return for each 8 bits the bytes whose bits are all set where theirs is: int64."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return _looked_up((bits * 255).to(torch.uint8).view(torch.int64)[:, 0], signs)


def _codes(numbers: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Return the codes of magnitudes, 8 in an int64, whose signs are 8 bits: `[..., n]` int64 to `[..., 8 * n]`."""
    negative = _sign_bytes(signs)
    # No magnitude is zero, so that no byte carries. Flipping a byte's highest bit adds 128.
    signed = (numbers ^ negative) + (negative & _EACH_BYTE)
    return (signed ^ (CENTRE * _EACH_BYTE - (1 << 64))).view(torch.uint8)


def _entries(index: torch.Tensor, grid: str, magnitudes: tuple[int, ...]) -> torch.Tensor:
    """Return the magnitudes of some entries of a grid, a byte each: `[..., 8 * n / width]` int64 for `[..., n]`."""
    bits, width = (3, 4) if len(magnitudes) == 8 else (2, 8)
    stored = torch.tensor(list(base64.b85decode(grid)), dtype=torch.uint8)
    numbers = (_bits(stored, range(8), 1).view(-1, bits) << torch.arange(bits)).sum(1)
    table = torch.tensor(magnitudes, dtype=torch.uint8)[numbers].view(-1, width)
    return _looked_up(table.view(torch.int32 if width == 4 else torch.int64)[:, 0], index).view(torch.int64)
