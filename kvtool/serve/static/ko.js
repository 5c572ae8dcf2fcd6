// The page in Korean, by its English texts.

export const KO = {
  // the page
  "To the question": "질문 입력란으로 이동",
  "New chat": "새 대화",
  "The server does not answer. This page looks for it every few seconds.":
    "서버가 응답하지 않습니다. 몇 초마다 다시 연결해 봅니다.",
  "Try now": "지금 연결",
  "Try again": "다시 시도",
  "Ask the documents. Each answer shows the passages it was made from, and how much work the store has saved.":
    "문서에 관해 질문해 보세요. 답변마다 참고한 구절과 저장소 덕분에 줄어든 계산량을 보여 드립니다.",
  Conversation: "대화",
  Question: "질문",
  Ask: "질문하기",
  Stop: "중지",
  "Enter asks, Shift + Enter begins a line.": "Enter로 질문하고, Shift + Enter로 줄을 바꿉니다.",
  "no model yet": "아직 모델 없음",

  // options
  Options: "옵션",
  "Cite the sources": "출처 표시",
  "Check each answer by full prefill": "전체 프리필로 답변 검증",
  "Fusion mode": "융합 방식",
  "Most passages": "최대 구절 수",
  "Longest answer, in tokens": "최대 답변 길이(토큰)",
  "the server’s": "서버 설정",
  "the server’s ({0})": "서버 설정({0})",
  "Give a whole number from {0} to {1}, or nothing.": "{0}에서 {1} 사이의 정수를 입력하거나 비워 두세요.",
  "What do these words mean?": "용어 설명",
  "Adds a number to each sentence. It leads to the sentence of a passage that is most like it.":
    "문장 끝에 번호를 붙입니다. 번호를 누르면 가장 비슷한 원문 문장으로 이동합니다.",
  "Afterwards the model reads everything again without shortcuts, and corrects the answer where it differs.":
    "답변이 끝나면 모델이 저장된 계산 없이 모두 다시 읽고, 달라진 부분이 있으면 답변을 고칩니다.",
  "Which part of the stored passages is computed again for an answer: full all of it, reuse nothing, the others something between. More takes longer, and is nearer to what the model says without a store.":
    "저장된 구절 중 어느 부분을 다시 계산할지 정합니다. full은 전부, reuse는 전혀 다시 계산하지 않고, 나머지는 그 중간입니다. 많이 계산할수록 오래 걸리지만 저장소 없이 얻는 답변에 가까워집니다.",
  "How many pieces of the documents, about 256 tokens each, the model reads for an answer.":
    "답변할 때 모델이 읽는 문서 조각의 최대 개수입니다. 한 조각은 약 256토큰입니다.",
  "A token is a short word or a part of one. A longer answer is cut off.":
    "토큰은 짧은 단어나 단어의 일부입니다. 이보다 긴 답변은 중간에 잘립니다.",
  "What whoever runs the server has set.": "서버 운영자가 정한 값입니다.",

  // the key
  "API key": "API 키",
  "This server wants a key. Whoever runs it has it:":
    "이 서버를 쓰려면 API 키가 필요합니다. 서버 운영자가 확인하는 방법:",
  Key: "키",
  "16 or more letters, digits and signs without spaces": "공백 없이 영문자, 숫자, 기호 16자 이상",
  "It is kept until this tab is closed.": "이 탭을 닫을 때까지만 보관합니다.",
  "Use this key": "이 키 사용",
  Cancel: "취소",
  "The server does not know this key.": "등록되지 않은 키입니다.",
  "Without the API key this server answers nothing.": "API 키를 입력해야 이 서버를 사용할 수 있습니다.",

  // a conversation
  "Answer {0}": "답변 {0}",
  "Searching and reading…": "문서를 찾아 읽고 있습니다…",
  "Answering…": "답변하고 있습니다…",
  "Answering; full prefill checks it afterwards…": "답변하고 있습니다. 끝나면 전체 프리필로 검증합니다…",
  "The answer is complete.": "답변이 완료되었습니다.",
  "The answer is incomplete.": "답변이 완성되지 않았습니다.",
  "The answer is incomplete, and not part of the conversation.": "답변이 완성되지 않아 이 대화에는 포함되지 않습니다.",
  "There is no answer.": "답변을 받지 못했습니다.",
  "Stopped.": "중지했습니다.",
  "Ask again": "다시 질문하기",
  "Wait for the end of the answer, or stop it.": "답변이 끝날 때까지 기다리거나 중지해 주세요.",
  "Type a question first.": "먼저 질문을 입력해 주세요.",
  "A new conversation.": "새 대화를 시작합니다.",
  "The model ended its answer without a word.": "모델이 아무 말 없이 답변을 끝냈습니다.",
  "No passage has a word of the question: no document supports this answer.":
    "질문의 단어가 들어 있는 구절이 없습니다. 이 답변을 뒷받침하는 문서가 없습니다.",
  "The answer was cut off at its longest length.": "최대 길이에 이르러 답변이 잘렸습니다.",
  "The answer was ended because it repeated itself.": "같은 말이 되풀이되어 답변을 끝냈습니다.",
  "Full prefill checked the answer and corrected it after {0} of {1} tokens.":
    "전체 프리필로 검증한 결과, {1}토큰 중 {0}토큰 뒤부터 답변을 고쳤습니다.",
  "Full prefill checked the answer: it gives the same.": "전체 프리필로 검증한 결과, 답변이 같습니다.",
  "Answer before its correction": "고치기 전 답변",

  // errors
  "No documents yet: add some under “Documents”.": "아직 문서가 없습니다. ‘문서’에서 추가해 주세요.",
  "The server is busy. Try again in a moment.": "서버가 다른 요청을 처리하고 있습니다. 잠시 뒤에 다시 시도해 주세요.",
  "The answer took too long, and the server ended it.": "답변이 너무 오래 걸려 서버가 중단했습니다.",
  "The server is being shut down.": "서버를 종료하고 있습니다.",
  "The server has no space left for it.": "서버에 저장할 공간이 부족합니다.",
  "No passage matches the question.": "질문과 맞는 구절이 없습니다.",
  "A file of this name is there already, and no client has sent it: choose another name.":
    "이름이 같은 파일이 서버에 이미 있습니다. 다른 이름으로 추가해 주세요.",
  "It is not in the store any more.": "이미 저장소에 없는 문서입니다.",
  "It is pinned: whoever runs the server can unpin it.": "고정된 문서입니다. 서버 운영자가 고정을 해제할 수 있습니다.",
  "A shared store lists no documents.": "공유 저장소의 문서 목록은 볼 수 없습니다.",
  "Its file holds further documents, which would be removed with it.":
    "한 파일에 다른 문서도 들어 있어, 삭제하면 함께 삭제됩니다.",
  "The conversation is longer than the model takes: the turns before this one were left out.":
    "대화가 모델이 처리할 수 있는 길이를 넘어, 이번 질문보다 앞선 대화는 제외했습니다.",
  "The prompt has {0} tokens, the model takes {1}: shorten the question, set fewer passages, or begin a new chat.":
    "프롬프트가 {0}토큰인데 모델은 {1}토큰까지 처리합니다. 질문이나 구절 수를 줄이거나 새 대화를 시작해 주세요.",
  "The question has {0} characters, the model takes at most {1}: shorten it.":
    "질문이 {0}자인데 모델은 최대 {1}자까지 처리합니다. 질문을 줄여 주세요.",
  "A passage was missing in the store, or damaged there, and was computed for this answer.":
    "저장소에 없거나 손상된 구절이 있어 이번 답변에서 계산했습니다.",
  "What was sent is longer than the server takes.": "보낸 내용이 서버가 받을 수 있는 크기를 넘습니다.",
  "The server’s answer cannot be read: {0}.": "서버의 응답을 읽을 수 없습니다({0}).",
  "The server answered with status {0}.": "서버가 오류를 보냈습니다(상태 코드 {0}).",
  "The server does not answer.": "서버가 응답하지 않습니다.",
  "The server answers again.": "서버에 다시 연결되었습니다.",

  // sources
  "{0} source": "출처 {0}개",
  "{0} sources": "출처 {0}개",
  "A number in the answer leads to the sentence that has most words in common with it. That is no proof: a made-up sentence gets a number, too.":
    "답변의 번호는 공통된 단어가 가장 많은 원문 문장을 가리킵니다. 번호가 있다고 해서 사실이라는 뜻은 아닙니다. 지어낸 문장에도 번호가 붙습니다.",
  "Citation {0}: {1}": "인용 {0}: {1}",
  "Back to citation {0} in the answer": "답변으로 돌아가기(인용 {0})",
  "cited as {0}": "인용 번호 {0}",
  "line {0}": "{0}번째 줄",
  "the file has changed since": "추가한 뒤 파일이 변경됨",
  "the file is gone": "파일이 없어짐",
  "from {0}": "가져온 곳: {0}",

  // tokens and times
  token: "토큰",
  "A short word or a part of one: models read and write texts in such pieces.":
    "짧은 단어나 단어의 일부입니다. 모델은 이런 조각 단위로 글을 읽고 씁니다.",
  "keys and values (KV)": "키와 값(KV)",
  "What the model computes for each token that it reads. kvtool keeps them on disk, so that a passage is computed once, and not for each question.":
    "모델이 토큰을 읽을 때마다 계산하는 값입니다. kvtool은 이 값을 디스크에 저장하므로, 같은 구절을 질문마다 다시 계산하지 않습니다.",
  "full prefill": "전체 프리필",
  "Reading the whole prompt without the store: every token is computed. It is what other programs do, and the time that kvtool saves.":
    "저장소 없이 프롬프트 전체를 읽어 모든 토큰을 계산하는 것입니다. 다른 프로그램은 이렇게 하며, kvtool은 이 시간을 줄입니다.",
  "kept from earlier turns": "이전 대화에서 유지",
  "The conversation so far: the server still has it in memory, so that nothing is read or computed.":
    "지금까지의 대화입니다. 서버 메모리에 남아 있어 읽거나 계산하지 않습니다.",
  reused: "재사용",
  "Computed when the document was added, and only read from the store for this answer.":
    "문서를 추가할 때 계산해 두었고, 이번에는 저장소에서 읽기만 했습니다.",
  recomputed: "다시 계산",
  "Read from the store, and computed again, because these passages stand next to each other here.":
    "저장소에서 읽었지만, 여러 구절이 함께 놓이면서 맥락이 달라져 다시 계산했습니다.",
  fresh: "새로 계산",
  "Not in the store: your question, and what was missing.": "저장소에 없는 부분으로, 질문과 빠진 내용입니다.",
  "fusion mode": "융합 방식",
  "The rule that says which tokens of the stored passages are computed again.":
    "저장된 구절에서 어느 토큰을 다시 계산할지 정하는 규칙입니다.",
  "{0} {1}": "{1} {0}",
  "The question waited {0} for its turn, in addition.": "이와 별도로 질문이 차례를 {0} 동안 기다렸습니다.",
  "Other answers took {0} of the time to the first token.": "첫 토큰까지의 시간 중 {0}는 다른 답변에 쓰였습니다.",
  "The prompt has {0} tokens; fusion mode: {1}.": "프롬프트는 {0}토큰이며, 융합 방식은 {1}입니다.",
  "Time to the first token": "첫 토큰까지 걸린 시간",
  "this answer": "이번 답변",
  "full prefill, measured": "전체 프리필(측정)",
  "It computes earlier turns, too.": "이전 대화도 함께 계산한 시간입니다.",
  "This answer is full prefill’s: nothing was reused.": "이 답변은 전체 프리필로 만들었으며, 재사용한 것이 없습니다.",
  "Measured, by the check of this answer.": "이 답변을 검증하면서 측정했습니다.",
  "Began after {0}": "{0} 만에 답변 시작",
  "Began after {0} · {1}": "{0} 만에 답변 시작 · {1}",
  "without the store {0} (measured)": "저장소가 없으면 {0}(측정)",
  "Full prefill takes {0} times as long as this answer took.": "전체 프리필은 이 답변보다 {0}배 오래 걸립니다.",
  "Full prefill takes no longer here: a short prompt gains little from the store.":
    "이번에는 전체 프리필도 더 오래 걸리지 않습니다. 프롬프트가 짧으면 저장소의 이점이 작습니다.",
  "Measured just now; {0} token of earlier turns was kept.":
    "방금 측정했습니다. 이전 대화의 {0}토큰은 그대로 썼습니다.",
  "Measured just now; {0} tokens of earlier turns were kept.":
    "방금 측정했습니다. 이전 대화의 {0}토큰은 그대로 썼습니다.",
  "Measured just now, for the same question.": "같은 질문으로 방금 측정했습니다.",
  "Full prefill runs…": "전체 프리필을 실행하고 있습니다…",
  "Measure full prefill": "전체 프리필 측정",
  "{0} ms": "{0}ms",
  "{0} s": "{0}초",

  // the map
  "{0} of the passages’ {1} tokens were computed for this answer.":
    "구절의 {1}토큰 중 {0}토큰을 이번 답변에서 계산했습니다.",
  "Map of recomputed tokens": "다시 계산한 토큰 보기",
  "Tap a mark for its reason. Your question is not shown.":
    "표시된 부분을 누르면 이유가 나옵니다. 질문은 표시되지 않습니다.",
  "{0} reused": "재사용 {0}",
  "{0} recomputed: {1}": "다시 계산 {0}: {1}",
  "tokens {0} to {1}: {2}": "{0}~{1}번째 토큰: {2}",
  "missing in the store": "저장소에 없음",
  "first tokens of a passage, which join it to the one before": "앞 구절과 이어지는 구절의 첫 토큰",
  "tokens that would differ most from what is stored": "저장된 값과 가장 많이 달라질 토큰",
  "tokens that the question looks at most": "질문이 가장 많이 참조하는 토큰",
  "after the beginning that is the same as in the store": "저장된 것과 같은 앞부분의 뒤",
  "everything, as the fusion mode says": "융합 방식에 따라 전부",
  "left out by its compression level: neither read nor computed": "압축 수준에 따라 제외됨(읽지도 계산하지도 않음)",

  // documents
  Documents: "문서",
  "Add documents": "문서 추가",
  "or drop them here": "또는 여기로 끌어다 놓으세요",
  "Files that were sent": "보낸 파일",
  "Close this list": "목록 닫기",
  "This server takes no documents from here. Whoever runs it can allow that:":
    "이 서버는 여기에서 문서를 추가할 수 없도록 설정되어 있습니다. 서버 운영자가 허용하는 방법:",
  "Search by name": "이름으로 검색",
  "List all documents (more than 2,000)": "문서 모두 보기(2,000개 초과)",
  "Loading the list…": "목록을 불러오고 있습니다…",
  "No document yet.": "아직 문서가 없습니다.",
  "{0} of {1} documents": "문서 {1}개 중 {0}개",
  "{0} document": "문서 {0}개",
  "{0} documents": "문서 {0}개",
  "{0} more: search for them.": "{0}개가 더 있습니다. 이름으로 검색해 보세요.",
  "{0} token": "{0}토큰",
  "{0} tokens": "{0}토큰",
  "{0} of KV": "KV {0}",
  "{0} bytes": "{0}바이트",
  pinned: "고정됨",
  "in {0}": "폴더: {0}",
  "What do these numbers mean?": "숫자 설명",
  KV: "KV",
  "The keys and values that the model computed for the document. They take much more space than the file, and save the time of computing them for each question.":
    "모델이 문서를 읽고 계산한 키와 값입니다. 파일보다 훨씬 크지만, 질문할 때마다 다시 계산하는 시간을 아낍니다.",
  "Remove {0}": "{0} 삭제",
  Remove: "삭제",
  "Remove this document?": "이 문서를 삭제할까요?",
  "No answer will use it any more. A file that was added on this page, or by another client, is deleted from the server. Any other file stays where it is: the next ingest of its folder adds it again.":
    "앞으로 답변에 쓰이지 않습니다. 이 페이지나 다른 클라이언트에서 추가한 파일은 서버에서도 삭제됩니다. 그 밖의 파일은 그대로 남으며, 다음에 그 폴더를 다시 읽으면(ingest) 또 추가됩니다.",
  "Removing {0}…": "삭제하고 있습니다: {0}",
  "{0} is removed.": "삭제했습니다: {0}",
  "{0} is not removed.": "삭제하지 못했습니다: {0}.",

  // files that are sent
  "Progress of {0}": "{0} 진행률",
  waits: "대기 중",
  "waits for other documents": "다른 문서를 처리하는 동안 대기 중",
  "sending, {0} %": "보내는 중, {0}%",
  reading: "읽는 중",
  "reading files": "파일을 읽는 중",
  "computing: {0} of {1} tokens": "계산 중: {1}토큰 중 {0}토큰",
  "The server is adding documents.": "서버가 문서를 추가하고 있습니다.",
  "too large: at most {0}": "너무 큼: 최대 {0}",
  added: "추가됨",
  "added: the store had its text already": "추가됨: 이미 저장된 내용과 같음",
  replaced: "교체됨",
  unchanged: "변경 없음",
  "{0} of 1 file stored.": "파일 1개 중 {0}개를 저장했습니다.",
  "{0} of {1} files stored.": "파일 {1}개 중 {0}개를 저장했습니다.",
  "The page was closed before these files were stored: {0}. Add again what is missing in the list.":
    "다음 파일을 저장하기 전에 페이지가 닫혔습니다: {0}. 목록에 없는 파일은 다시 추가해 주세요.",
  "cannot be read: a folder is added by its files": "읽을 수 없음: 폴더는 안에 있는 파일을 골라 추가해 주세요",
  "a file cannot have this name here": "쓸 수 없는 파일 이름",
  empty: "빈 파일",
  "protected by a password": "비밀번호로 보호됨",
  "protected by its seller": "판매자의 복제 방지(DRM)로 보호됨",
  "only scanned pages, without text": "텍스트 없이 스캔한 페이지만 있음",
  "no text on its pages": "페이지에 텍스트가 없음",
  "damaged, or not what its name says": "손상되었거나 확장자와 다른 파일",
  damaged: "손상된 파일",
  "an old Office file: save it in the format that its name says":
    "옛 Office 파일: 확장자에 맞는 형식으로 다시 저장해 주세요",
  "no line has a text": "텍스트가 있는 줄이 없음",
  "takes too long to read": "읽는 데 시간이 너무 오래 걸림",
  "a picture: only text is read": "그림 파일: 텍스트만 읽을 수 있음",
  "an archive: add the files in it": "압축 파일: 압축을 풀어 추가해 주세요",
  "not a document": "문서가 아님",
  "too long": "너무 긴 파일",
};
