{{- define "muster.relay" -}}
{{ include "muster.fullname" . }}-relay
{{- end }}

{{- define "muster.relay.identity" -}}
{{ include "muster.identity" . }}
app.kubernetes.io/component: relay
{{- end }}

{{- /* The name under which workers of the same node reach it, with relay.tcp. */}}
{{- define "muster.relay.host" -}}
{{ include "muster.relay" . }}.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "muster.relay.upstream" -}}
{{ default (printf "%s:%v" (include "muster.host" .) .Values.service.grpcPort) .Values.relay.upstream }}
{{- end }}

{{- /* Its own certificate, so that the coordinator's key is not on every node. */}}
{{- define "muster.relay.tlsSecret" -}}
{{ default (printf "%s-tls" (include "muster.relay" .)) .Values.relay.tcp.tlsSecret }}
{{- end }}

{{- define "muster.relay.tokensSecret" -}}
{{ .Values.relay.tcp.tokensSecret }}
{{- end }}

{{- /* What the relay listens with: it asks its workers for what the coordinator asks them for. */}}
{{- define "muster.relay.args" -}}
- relay
{{- if .Values.relay.tcp.enabled }}
- --listen={{ include "muster.bindHost" . }}:7550
{{- if .Values.tls.enabled }}
- --tls-cert=/etc/muster/tls/tls.crt
- --tls-key=/etc/muster/tls/tls.key
{{- if .Values.tls.clientAuth.enabled }}
- --tls-client-ca=/etc/muster/client-ca/ca.crt
{{- end }}
{{- end }}
{{- if .Values.tokens.enabled }}
- --tokens-file=/etc/muster/tokens/tokens.toml
{{- end }}
{{- if not (include "muster.secured" .) }}
- --insecure
{{- end }}
{{- else }}
- --listen=unix:///run/muster/relay.sock
- --socket-mode={{ .Values.relay.socket.mode }}
{{- end }}
- --http={{ include "muster.bindHost" . }}:7551
{{- with .Values.relay.auditLog }}
- --audit-log={{ . }}
{{- end }}
{{- if not (kindIs "invalid" .Values.relay.foldWindowMs) }}
- --fold-window-ms={{ .Values.relay.foldWindowMs }}
{{- end }}
{{- end }}

{{- define "muster.checkRelay" -}}
{{- $relay := .Values.relay }}
{{- if $relay.enabled }}
{{- if and .Values.tokens.enabled (not $relay.client.tokenSecret) }}
{{- fail "tokens.enabled: the relays need a token, too, of role worker and for every run that may use them: set relay.client.tokenSecret." }}
{{- end }}
{{- if and $relay.tcp.enabled .Values.tokens.enabled (not $relay.tcp.tokensSecret) }}
{{- fail "relay.tcp.enabled: the tokens of operators, in the coordinator's tokens.toml, have no place on every node: name a Secret whose tokens.toml has the workers' tokens and issuers alone in relay.tcp.tokensSecret." }}
{{- end }}
{{- if and .Values.tls.clientAuth.enabled (not $relay.client.certificateSecret) }}
{{- fail "tls.clientAuth.enabled: the relays need a certificate, too: set relay.client.certificateSecret." }}
{{- end }}
{{- if and $relay.tcp.enabled .Values.tls.enabled (not .Values.tls.certManager.enabled) (not $relay.tcp.tlsSecret) }}
{{- fail (printf "relay.tcp.enabled: workers speak TLS to the relays, too: name a Secret with a certificate for %s in relay.tcp.tlsSecret." (include "muster.relay.host" .)) }}
{{- end }}
{{- if and (not $relay.tcp.enabled) $relay.socket.chown (not $relay.podSecurity.runAsUser) }}
{{- fail "relay.socket.chown: set the folder's owner in relay.podSecurity.runAsUser, or set relay.socket.chown=false and have it made on the nodes." }}
{{- end }}
{{- end }}
{{- end }}
